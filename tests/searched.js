(async () => {
  const box = document.querySelector("[data-md-component=search-query]");
  if (!box) return ["there is no search"];
  box.focus();
  box.value = "prefetch";
  for (let turn = 0; turn < 100; turn++) {
    box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    await new Promise(done => setTimeout(done, 100));
    if (document.querySelector(".md-search-result__item a[href*=moving]")) return [];
  }
  return ["searching for prefetch does not find the page about moving data"];
})()
