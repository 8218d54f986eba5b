// Shows the page anew every two seconds without a flicker. Without it, the browser reloads (noscript).
(() => {
  const every = 2000;
  const again = async () => {
    const chosen = String(getSelection());
    if (!document.hidden && !chosen) {
      try {
        const answer = await fetch(location.href, { cache: "no-store" });
        const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
        for (const part of ["main", "header", "footer"]) {
          const next = fresh.querySelector(part), now = document.querySelector(part);
          if (next && now && next.innerHTML !== now.innerHTML) {
            const sideways = [...now.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
            now.replaceWith(next);
            next.querySelectorAll(".scroll").forEach((each, i) => { each.scrollLeft = sideways[i] || 0; });
          }
        }
        document.title = fresh.title || document.title;
        document.body.classList.remove("lost");
      } catch {
        document.body.classList.add("lost");
      }
    }
    setTimeout(again, every);
  };
  setTimeout(again, every);
})();
