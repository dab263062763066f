"use strict";
(() => {
  const steps = [...document.querySelectorAll(".step")];
  const tip = document.getElementById("tip");
  const query = document.getElementById("query");
  const found = document.getElementById("found");
  const colours = ["by-logprob", "by-version", "by-none"].map((id) => document.getElementById(id));
  for (const id of ["search", "keys"]) document.getElementById(id).hidden = false;

  const current = () => steps.indexOf(document.activeElement && document.activeElement.closest(".step"));
  const go = (index) => {
    if (index < 0 || index >= steps.length) return;
    steps[index].focus({ preventScroll: true });
    steps[index].scrollIntoView({ block: "start" });
  };
  const nearest = () => {
    const below = steps.findIndex((step) => step.getBoundingClientRect().bottom > 90);
    return below < 0 ? steps.length - 1 : below;
  };
  const move = (by) => {
    const at = current();
    go(at < 0 ? nearest() : at + by);
  };

  let hits = [];
  let texts = null;
  const search = () => {
    const wanted = query.value.trim().toLowerCase();
    texts = texts || steps.map((step) => step.textContent.toLowerCase().replaceAll("↵", ""));
    for (const index of hits) steps[index].classList.remove("hit-turn");
    hits = wanted ? steps.map((_, index) => index).filter((index) => texts[index].includes(wanted)) : [];
    for (const index of hits) steps[index].classList.add("hit-turn");
    found.textContent = wanted ? `${hits.length} of ${steps.length} turns` : "";
  };
  const nextHit = () => {
    const at = current();
    if (hits.length) go(hits.find((index) => index > at) ?? hits[0]);
  };
  query.addEventListener("input", search);
  query.addEventListener("keydown", (event) => {
    if (event.key === "Enter") { event.preventDefault(); nextHit(); }
    if (event.key === "Escape") { query.value = ""; search(); query.blur(); }
  });

  document.addEventListener("keydown", (event) => {
    const typing = event.target instanceof HTMLInputElement && event.target.type === "search";
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "j") move(1);
    else if (event.key === "k") move(-1);
    else if (event.key === "n") nextHit();
    else if (event.key === "/") { event.preventDefault(); query.focus(); }
    else if (event.key === "c") colours[(colours.findIndex((one) => one.checked) + 1) % colours.length].checked = true;
    else if (event.key === "Escape") tip.hidden = true;
  });

  const show = (text, x, y) => {
    tip.textContent = text;
    tip.hidden = false;
    const fits = y + 18 + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(8, Math.min(x + 12, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${fits ? y + 18 : y - tip.offsetHeight - 12}px`;
  };
  document.addEventListener("click", (event) => {
    const token = event.target instanceof Element ? event.target.closest(".tokens [title]") : null;
    if (token) show(token.title, event.clientX, event.clientY);
    else tip.hidden = true;
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { passive: true });
  for (const hit of document.querySelectorAll(".hit")) {
    const title = hit.querySelector("title");
    hit.addEventListener("pointerdown", (event) => show(title.textContent, event.clientX, event.clientY));
  }

  const folded = [];
  window.addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details.fold:not([open])")) { fold.open = true; folded.push(fold); }
  });
  window.addEventListener("afterprint", () => { for (const fold of folded.splice(0)) fold.open = false; });
})();
