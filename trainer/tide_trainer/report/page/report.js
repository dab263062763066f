"use strict";
(() => {
  const tip = document.getElementById("tip");
  for (const hit of document.querySelectorAll(".hit")) {
    const title = hit.querySelector("title");
    hit.dataset.tip = title.textContent;
    title.remove();
  }
  const hide = () => { tip.hidden = true; };
  document.addEventListener("pointermove", (event) => {
    const hit = event.target instanceof Element ? event.target.closest(".hit") : null;
    if (!hit) { hide(); return; }
    tip.textContent = hit.dataset.tip;
    tip.hidden = false;
    const left = Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8);
    const below = event.clientY + 18;
    const fits = below + tip.offsetHeight < window.innerHeight;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${fits ? below : event.clientY - tip.offsetHeight - 12}px`;
  });
  document.addEventListener("pointerleave", hide);
  window.addEventListener("beforeprint", () => {
    for (const fold of document.querySelectorAll("details.table")) fold.open = true;
  });
})();
