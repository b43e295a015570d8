// Loads the page again when one of its files could not be loaded: the network changed, or the gateway was restarting.

(() => {
  const AGAIN_MS = 2000;
  let isComing = false;

  /** Reload as soon as the gateway answers: a browser's own page for an error would stay. */
  function reload() {
    fetch(location.pathname, { cache: "no-store" }).then(
      () => location.reload(),
      () => setTimeout(reload, AGAIN_MS),
    );
  }

  addEventListener(
    "error",
    (event) => {
      const isFile = event.target instanceof HTMLScriptElement || event.target instanceof HTMLLinkElement;
      if (!isFile || isComing) return;
      isComing = true;
      const app = document.getElementById("app");
      if (app && !app.hasChildNodes()) app.textContent = "A file of the console could not be loaded. Trying again…";
      setTimeout(reload, AGAIN_MS);
    },
    true,
  );
})();
