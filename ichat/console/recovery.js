// Loads the page again when one of its files could not be loaded: the network changed, or the gateway was restarting.

(() => {
  const AGAIN_MS = 2000;
  const RELOADS_MAX = 5; // a file that never loads, since something blocks it, must not keep the others from their work
  const COUNT = "ichat.reloads";
  let hasFailed = false;

  /** Reload as soon as the gateway answers: from a browser's own page for an error there is no way back. */
  async function reload() {
    const answer = await fetch(location.pathname, { cache: "no-store" }).catch(() => null);
    if (answer?.ok) location.reload();
    else setTimeout(reload, AGAIN_MS);
  }

  addEventListener(
    "error",
    (event) => {
      const file = event.target;
      if (!(file instanceof HTMLScriptElement || file instanceof HTMLLinkElement) || hasFailed) return;
      hasFailed = true;
      const reloads = Number(sessionStorage.getItem(COUNT) ?? 0);
      const isOver = reloads >= RELOADS_MAX;
      const app = document.getElementById("app");
      const name = file instanceof HTMLLinkElement ? file.href : file.src;
      if (app && !app.hasChildNodes())
        app.textContent = isOver
          ? `${name}, or a file that it needs, cannot be loaded. Look for a proxy or an extension that blocks it.`
          : "A file of the console could not be loaded. Trying again…";
      if (isOver) return;
      sessionStorage.setItem(COUNT, String(reloads + 1));
      setTimeout(reload, AGAIN_MS);
    },
    true,
  );
  addEventListener("load", () => {
    if (!hasFailed) sessionStorage.removeItem(COUNT);
  });
})();
