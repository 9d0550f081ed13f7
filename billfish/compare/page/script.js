"use strict";
(() => {
  const root = document.documentElement;
  const $ = (id) => document.getElementById(id);

  // Colours: as the system, light, dark.
  const themes = ["system", "light", "dark"];
  const words = { system: "Colours: as the system", light: "Colours: light", dark: "Colours: dark" };
  const signs = { system: "◐", light: "○", dark: "●" };
  let theme = "system";
  try { theme = localStorage.getItem("billfish-theme") || theme; } catch { /* a file may have no storage */ }
  const button = $("theme");
  const paint = () => {
    if (!themes.includes(theme)) theme = "system";
    if (theme === "system") delete root.dataset.theme; else root.dataset.theme = theme;
    button.textContent = signs[theme];
    button.title = words[theme];
    button.setAttribute("aria-label", words[theme]);
  };
  button.addEventListener("click", () => {
    theme = themes[(themes.indexOf(theme) + 1) % themes.length];
    try { localStorage.setItem("billfish-theme", theme); } catch { /* then it lasts until closing */ }
    paint();
  });
  paint();

  // What a mark shows: under the pointer, or by the arrow keys in a chart that has the focus.
  const tip = $("tip");
  let current = null;
  const show = (mark) => {
    if (current) current.classList.remove("on");
    current = mark;
    if (!mark) { tip.hidden = true; return; }
    mark.classList.add("on");
    tip.textContent = mark.dataset.said;
    tip.hidden = false;
    place(mark);
  };
  const place = (mark) => {
    const box = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
    const left = Math.min(Math.max(8, box.left + box.width / 2 - own.width / 2), innerWidth - own.width - 8);
    const above = box.top - own.height - 10;
    tip.style.left = `${left}px`;
    tip.style.top = `${above > 8 ? above : box.bottom + 10}px`;
  };
  for (const mark of document.querySelectorAll(".mark")) {
    const title = mark.querySelector("title");
    mark.dataset.said = title.textContent;
    mark.addEventListener("pointerenter", () => { title.remove(); show(mark); });
    mark.addEventListener("pointerleave", () => { mark.prepend(title); show(null); });
  }
  for (const chart of document.querySelectorAll("svg[tabindex]")) {
    const marks = [...chart.querySelectorAll(".mark")];
    if (!marks.length) { chart.removeAttribute("tabindex"); continue; }
    chart.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") show(null);
      if (!step) return;
      event.preventDefault();
      const at = marks.indexOf(current);
      show(marks[at < 0 ? (step > 0 ? 0 : marks.length - 1) : (at + step + marks.length) % marks.length]);
    });
    chart.addEventListener("blur", () => show(null));
  }
  addEventListener("scroll", () => { if (current) place(current); }, { passive: true });

  // A link to a technique opens its card.
  const unfold = () => {
    const card = location.hash && $(location.hash.slice(1));
    if (card && card.matches(".card")) for (const d of card.querySelectorAll(":scope > details")) d.open = true;
  };
  addEventListener("hashchange", unfold);
  unfold();

  // On paper everything is open.
  addEventListener("beforeprint", () => { for (const d of document.querySelectorAll("details")) d.open = true; });

  // Which section is being read.
  const links = new Map([...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]));
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      for (const link of links.values()) link.removeAttribute("aria-current");
      links.get(entry.target.id)?.setAttribute("aria-current", "true");
    }
  }, { rootMargin: "-20% 0px -70% 0px" });
  for (const id of links.keys()) if ($(id)) watch.observe($(id));

  $("save").addEventListener("click", () => {
    const url = URL.createObjectURL(new Blob([$("data").textContent], { type: "application/json" }));
    const link = Object.assign(document.createElement("a"), { href: url, download: "billfish-compare.json" });
    link.click();
    URL.revokeObjectURL(url);
  });
})();
