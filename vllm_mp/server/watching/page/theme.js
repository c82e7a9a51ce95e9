// The theme: that of the system, until the button chooses another. A script of its own, because it must run before the
// first paint.
{
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");

  const saved = () => {
    try {
      return localStorage.getItem("vllm_mp.theme");
    } catch {
      return null;
    }
  };

  const toggle = () => {
    const now = root.dataset.theme ?? (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("vllm_mp.theme", root.dataset.theme);
    } catch {
      // Storage is forbidden: the choice lasts as long as the page.
    }
  };

  if (saved() === "dark" || saved() === "light") root.dataset.theme = saved();
  document.addEventListener("DOMContentLoaded", () => {
    document.getElementById("theme").addEventListener("click", toggle);
  });
}
