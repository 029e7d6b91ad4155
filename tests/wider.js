(() => {
  const scrolls = e => /auto|scroll/.test(getComputedStyle(e).overflowX);
  const found = [], width = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > width)
    found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const e of document.querySelectorAll("article, article *")) {
    const box = e.getBoundingClientRect();
    if (box.width < 1 || box.height < 1 || box.right <= width + 1) continue;
    let up = e.parentElement;
    while (up && !scrolls(up)) up = up.parentElement;
    if (!up) found.push(`${e.tagName} ${e.textContent.trim().slice(0, 40)} ends at ${box.right}`);
  }
  return found.slice(0, 3);
})()
