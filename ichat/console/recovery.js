// Loads the page again when one of its files could not be loaded: the network changed, or the gateway was restarting.

(() => {
  const AGAIN_MS = 2000;
  const RELOADS_MAX = 5; // a file that never loads, since something blocks it, must not keep the others from their work
  const COUNT = "ichat.reloads";
  const chosen = localStorage.getItem("ichat.language");
  const isChinese = chosen ? chosen === "zh" : navigator.language.startsWith("zh");
  let hasFailed = false;

  /**
   * Return why the page is empty. The console's texts are one of the files that may be missing.
   *
   * @param {string} name
   * @param {boolean} isOver
   */
  function textOf(name, isOver) {
    if (isChinese)
      return isOver
        ? `无法加载 ${name} 或它需要的文件。请检查是否被代理或浏览器扩展拦截。`
        : "控制台的一个文件无法加载，正在重试…";
    return isOver
      ? `${name}, or a file that it needs, cannot be loaded. Look for a proxy or an extension that blocks it.`
      : "A file of the console could not be loaded. Trying again…";
  }

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
      if (app && !app.hasChildNodes()) app.textContent = textOf(name, isOver);
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
