// Sets the theme before the page is painted: the theme that was chosen here, else the system's.
(() => {
  const chosen = localStorage.getItem("ichat.theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
