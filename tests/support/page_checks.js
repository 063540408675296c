// Returns what keeps people from reading or using what the page shows now. `least` is the contrast
// that text needs with what is behind it.
(least) => {
  const found = [];
  const shown = (element) => element.checkVisibility();
  const all = (selector) => [...document.querySelectorAll(selector)].filter(shown);

  const levels = all("h1, h2, h3").map((heading) => Number(heading.tagName[1]));
  if (levels.filter((level) => level === 1).length !== 1) found.push("it needs one h1");
  levels.forEach((level, at) => {
    if (at && level > levels[at - 1] + 1) found.push(`h${level} follows h${levels[at - 1]}`);
  });

  for (const table of all("table")) {
    const { key } = table.dataset;
    if (!table.caption?.textContent) found.push(`${key} has no caption`);
    const columns = table.tHead.rows[0].cells.length;
    for (const row of table.querySelectorAll(":scope > tbody > tr:not(.detail)"))
      if (row.cells.length !== columns) found.push(`${key} has a row of ${row.cells.length} cells`);
    // On a narrow screen rows are cards, of which browsers forget what they are without a role.
    for (const part of table.querySelectorAll("tr, th, td, thead, tbody"))
      if (!part.getAttribute("role")) found.push(`${part.tagName} of ${key} has no role`);
  }

  const names = new Set();
  for (const button of all("button")) {
    const name = button.textContent.trim();
    if (!name || names.has(name)) found.push(`two buttons are called ${name}`);
    names.add(name);
    const controls = button.getAttribute("aria-controls");
    if (controls && !document.getElementById(controls)) found.push(`${name} controls nothing`);
    const { height, width } = button.getBoundingClientRect();
    if (height < 24 || width < 24) found.push(`${name} is too small to be hit`);
  }
  for (const field of all("input, progress, meter, [role=img]")) {
    const other = document.getElementById(field.getAttribute("aria-labelledby"));
    if (!(field.ariaLabel || field.labels?.length || other?.textContent))
      found.push(`${field.outerHTML} has no label`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  ids.forEach((id, at) => {
    if (ids.indexOf(id) !== at) found.push(`${id} is there twice`);
  });
  if (all("[tabindex]").some((element) => element.tabIndex > 0))
    found.push("the order of the keyboard is not that of the page");

  const numbers = (color) => color.match(/[\d.]+/g).map(Number);
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = ([red, green, blue]) => {
    const [r, g, b] = [red, green, blue].map((part) => linear(part / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const color = numbers(getComputedStyle(at).backgroundColor);
      if (color.length === 3 || color[3] === 1) return color;
    }
    return [255, 255, 255];
  };
  const hasText = (node) => node.nodeType === Node.TEXT_NODE && node.data.trim();
  const faint = new Set();
  for (const element of all("body *")) {
    if (![...element.childNodes].some(hasText)) continue;
    const text = luminance(numbers(getComputedStyle(element).color));
    const back = luminance(behind(element));
    const ratio = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
    if (ratio < least)
      faint.add(`${ratio.toFixed(2)} of ${element.tagName}: ${element.textContent.slice(0, 30)}`);
  }
  return [...found, ...faint];
}
