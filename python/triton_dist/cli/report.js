"use strict";
// Build the page from the JSON in the element "data". Texts are set as text, never as HTML.
const page = JSON.parse(document.getElementById("data").textContent);
const main = page.tables[0];
const ROW = 28; // height of a table row in pixels, as in report.css

const make = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    name.startsWith("on") ? made[name] = value : made.setAttribute(name, value);
  made.append(...children);
  return made;
};
const show = (...elements) => document.body.append(...elements);
const isTime = value => /^\d{4}-\d\d-\d\dT[\d:.]+\+00:00$/.test(value);
const local = time => new Date(time).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
const shown = (value, digits = null) => value === null ? "–" : isTime(value) ? local(value)
  : digits === null ? String(value) : value.toFixed(digits);
const texts = ({ columns, rows }, row) => columns.map(({ digits }, at) => shown(rows[row][at], digits));
const compare = (a, b) => typeof a === "number" && typeof b === "number" ? a - b
  : String(a).localeCompare(String(b), undefined, { numeric: true });

// A table that can be sorted and filtered. Only the rows in sight are in the document.
function table(spec, filtered) {
  const { title, note, columns, rows, marked, links } = spec;
  let visible = rows.map((_, row) => row), order = { at: -1, up: true };
  const picked = new Map(), body = make("tbody"), count = make("p", { class: "dim", role: "status" });
  const ruler = make("canvas").getContext("2d");
  ruler.font = `bold ${getComputedStyle(document.body).font.replace(/^[^\d]*/, "")}`;
  const widths = columns.map(({ name, digits }, at) => {
    const longest = rows.map(row => shown(row[at], digits)).reduce((a, b) => a.length < b.length ? b : a, "");
    return 22 + Math.min(800, Math.max(ruler.measureText(name).width, ruler.measureText(longest).width));
  });
  const kinds = columns.map(({ sticky }, at) => (sticky ? "sticky " : "")
    + (rows.every(row => row[at] === null || typeof row[at] === "number") ? "number" : ""));
  const lefts = widths.map((_, at) => columns[at].sticky
    ? `left: ${widths.slice(0, at).reduce((sum, width) => sum + width, 0)}px` : "");
  const cell = (tag, at, attributes, child) => make(tag, { class: kinds[at], style: lefts[at], ...attributes }, child);
  const space = count => make("tr", { class: "space", "aria-hidden": true, style: `height: ${count * ROW}px` },
    make("td", { colspan: columns.length }));
  const line = (row, index) => make("tr", { class: row === marked ? "mark" : "", "aria-rowindex": index },
    ...texts(spec, row).map((text, at) => cell("td", at, { title: text },
      at === 0 && links ? make("a", { href: links[row] }, text) : text)));
  const draw = () => {
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 10);
    const last = Math.min(visible.length, first + Math.ceil(innerHeight / ROW) + 20);
    const lines = visible.slice(first, last).map((row, place) => line(row, first + place + 2));
    body.replaceChildren(space(first), ...lines, space(visible.length - last));
  };
  const update = () => {
    const words = search.value.toLowerCase(), { at, up } = order, isEmpty = row => rows[row][at] === null;
    visible = rows.map((_, row) => row).filter(row => [...picked].every(([at, value]) => rows[row][at] === value)
      && (!words || texts(spec, row).some(text => text.toLowerCase().includes(words))));
    if (at >= 0) visible.sort((a, b) => isEmpty(a) || isEmpty(b) ? isEmpty(a) - isEmpty(b)
      : (up ? 1 : -1) * compare(rows[a][at], rows[b][at]));
    count.textContent = `${visible.length} of ${rows.length} rows; a click on a heading sorts`;
    draw();
  };
  const filter = () => {
    update();
    filtered(new Set(visible));
  };
  const search = make("input", { type: "search", oninput: filter });
  const filters = make("div", { class: "filters" }, make("label", {}, "search ", search));
  columns.forEach(({ name, filter: isFiltered }, at) => {
    if (!isFiltered) return;
    const values = [...new Set(rows.map(row => row[at]))].sort(compare);
    const onchange = ({ target }) => {
      target.value ? picked.set(at, values[target.value]) : picked.delete(at);
      filter();
    };
    filters.append(make("label", {}, `${name} `, make("select", { onchange }, make("option", { value: "" }, "any"),
      ...values.map((value, place) => make("option", { value: place }, shown(value))))));
  });
  const heads = columns.map(({ name }, at) => cell("th", at, { scope: "col" }, make("button", { onclick: () => {
    order = { at, up: order.at === at ? !order.up : true };
    heads.forEach(head => head.removeAttribute("aria-sort"));
    heads[at].setAttribute("aria-sort", order.up ? "ascending" : "descending");
    update();
  } }, name)));
  const scroll = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": title, onscroll: draw },
    make("table", { "aria-rowcount": rows.length + 1 },
      make("colgroup", {}, ...widths.map(width => make("col", { style: `width: ${width}px` }))),
      make("thead", {}, make("tr", {}, ...heads)), body));
  show(make("h2", {}, title), make("p", { class: "dim" }, note), ...(spec === main ? [filters, count] : []), scroll);
  addEventListener("resize", draw);
  update();
}

const plots = [];
const colour = () => getComputedStyle(document.body).color;
const hover = row => row < 0 ? "" : texts(main, row).map((text, at) => `${main.columns[at].name} ${text}`)
  .map(text => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;")).join("<br>");

function plot({ data, layout }, place) {
  if (!window.Plotly) return place.append("plotly.min.js is missing: copy it next to this page.");
  for (const trace of data) {
    if (trace.customdata) Object.assign(trace, { text: trace.customdata.map(hover), hovertemplate: "%{text}<extra></extra>" });
    if (layout.xaxis.type === "date") trace.x = trace.x.map(time => { // plotly knows no time zones
      const at = new Date(time);
      return new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, -1);
    });
  }
  const dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom"; // a finger scrolls the page
  Plotly.newPlot(place, data, { ...layout, dragmode, font: { color: colour() } }, { responsive: true,
    displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  plots.push(place);
}

function dim(kept) { // the points of configs that the table does not show
  plots.forEach(plot => plot.data.forEach(({ customdata }, trace) => {
    if (!customdata) return;
    const points = customdata.flatMap((row, point) => kept.has(row) ? [point] : []);
    Plotly.restyle(plot, { selectedpoints: [kept.size < main.rows.length ? points : null] }, [trace]);
  }));
}

show(make("h1", {}, page.title));
if (page.cards) {
  const cards = page.cards.map(([name, value, note]) =>
    make("div", {}, name, make("b", {}, value), make("code", {}, note)));
  const facts = page.facts.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, shown(text))]);
  show(make("div", { class: "cards" }, ...cards), make("dl", {}, ...facts));
}
const frames = page.figures.map(({ title, text }) => make("div", { role: "img", "aria-label": `${title}. ${text}` }));
show(make("div", { class: "figures" }, ...page.figures.map(({ title, text }, at) =>
  make("figure", {}, make("h2", {}, title), make("p", { class: "dim" }, text), frames[at]))));
page.figures.forEach((figure, at) => plot(figure, frames[at])); // the frames have their widths now
if (page.changes?.length) show(make("h2", {}, "Since the older record"), make("pre", {}, page.changes.join("\n")));
page.tables.forEach(each => table(each, each === main ? dim : () => {}));
matchMedia("(prefers-color-scheme: dark)").onchange = () =>
  plots.forEach(place => Plotly.relayout(place, { "font.color": colour() }));
