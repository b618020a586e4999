// Runs before anything is drawn: what was chosen last time, or else what the system prefers.
"use strict";
(() => {
  const root = document.documentElement;
  let chosen = null;
  try {
    chosen = localStorage.getItem("yocolm-theme");
  } catch {
    // Storage is closed to this page: the system's preference holds.
  }
  const system = matchMedia("(prefers-color-scheme: dark)");
  const show = () => {
    root.dataset.theme = chosen || (system.matches ? "dark" : "light");
  };
  show();
  system.addEventListener("change", show);
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", () => {
      chosen = root.dataset.theme === "dark" ? "light" : "dark";
      try {
        localStorage.setItem("yocolm-theme", chosen);
      } catch {
        // It holds until the page is left.
      }
      show();
    });
  });
})();
