"use strict";
// Arrow keys go from mark to mark of a picture; what a mark says is shown above it.
const format = (ns) => {
  for (const [unit, size] of [["s", 1e9], ["ms", 1e6], ["us", 1e3]]) {
    if (ns >= 0.9995 * size) {
      const n = ns / size;
      return n.toFixed(n < 9.995 ? 2 : n < 99.95 ? 1 : 0) + " " + unit;
    }
  }
  return ns.toFixed(0) + " ns";
};
for (const figure of document.querySelectorAll("figure")) {
  const output = figure.querySelector("output");
  const labels = [...figure.querySelectorAll(".labels li")].map((item) => item.textContent);
  const marks = [...figure.querySelectorAll(".mark")];
  const say = (mark) => {
    if (mark.dataset.e) {
      const [label, start, length] = mark.dataset.e.split(" ").map(Number);
      const text = labels[label] + ": " + format(length) + ", from " + format(start);
      mark.setAttribute("role", "img");
      mark.setAttribute("aria-label", text);
    }
    output.textContent = mark.getAttribute("aria-label");
  };
  const rowOf = (mark) => mark.closest("[data-row]").dataset.row;
  const middle = (mark) => {
    const box = mark.getBoundingClientRect();
    return box.left + box.width / 2;
  };
  const go = (from, to) => {
    if (!to) return;
    from.setAttribute("tabindex", "-1");
    to.setAttribute("tabindex", "0");
    say(to);
    to.focus();
    to.scrollIntoView({ block: "nearest", inline: "nearest" });
  };
  const acrossFrom = (mark, step) => {
    const rows = [...new Set(marks.map(rowOf))];
    const row = rows[rows.indexOf(rowOf(mark)) + step];
    const near = marks.filter((other) => rowOf(other) === row);
    const at = middle(mark);
    return near.sort((a, b) => Math.abs(middle(a) - at) - Math.abs(middle(b) - at))[0];
  };
  const alongFrom = (mark, step) => {
    const row = marks.filter((other) => rowOf(other) === rowOf(mark));
    return row[row.indexOf(mark) + step];
  };
  figure.addEventListener("keydown", (event) => {
    const mark = event.target.closest(".mark");
    if (!mark) return;
    const rows = new Set(marks.map(rowOf)).size;
    const to = {
      ArrowRight: () => alongFrom(mark, 1),
      ArrowLeft: () => alongFrom(mark, -1),
      ArrowDown: () => (rows > 1 ? acrossFrom(mark, 1) : alongFrom(mark, 1)),
      ArrowUp: () => (rows > 1 ? acrossFrom(mark, -1) : alongFrom(mark, -1)),
      Home: () => marks[0],
      End: () => marks[marks.length - 1],
    }[event.key];
    if (!to) return;
    event.preventDefault();
    go(mark, to());
  });
  for (const kind of ["focusin", "mouseover"]) {
    figure.addEventListener(kind, (event) => {
      const mark = event.target.closest(".mark");
      if (mark) say(mark);
    });
  }
  const svg = figure.querySelector(".timeline");
  if (!svg) continue;
  const left = Number(svg.dataset.left);
  let zoom = 1;
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  const drawn = [...svg.querySelectorAll("rect.mark, text.on, .tick")].map((item) => ({
    item, x: Number(item.getAttribute("x")), width: Number(item.getAttribute("width")),
  }));
  const lines = [...svg.querySelectorAll(".grid")].map((item) => ({
    item, x: Number(item.getAttribute("d").slice(1).split(" ")[0]), rest: item.getAttribute("d").split(" ")[1],
  }));
  const unzoomed = svg.getBoundingClientRect().width;
  figure.addEventListener("click", (event) => {
    const by = Number(event.target.dataset.zoom);
    if (!by) return;
    zoom = Math.min(64, Math.max(1, zoom * by));
    const to = (x) => left + (x - left) * zoom;
    for (const { item, x, width } of drawn) {
      item.setAttribute("x", to(x));
      if (width) item.setAttribute("width", width * zoom);
    }
    for (const { item, x, rest } of lines) item.setAttribute("d", "M" + to(x) + " " + rest);
    svg.setAttribute("viewBox", "0 0 " + to(width) + " " + height);
    svg.style.width = zoom === 1 ? "" : (unzoomed * to(width)) / width + "px";
  });
}
for (const button of document.querySelectorAll("thead button")) {
  button.addEventListener("click", () => {
    const title = button.parentElement;
    const body = title.closest("table").tBodies[0];
    const sorted = title.getAttribute("aria-sort");
    const key = (row) => row.cells[title.cellIndex].dataset.key ?? row.cells[title.cellIndex].textContent;
    const numbers = [...body.rows].every((row) => key(row) === "" || !Number.isNaN(Number(key(row))));
    // Numbers: the greatest first, that is what one looks for.
    const down = sorted ? sorted === "ascending" : numbers;
    const compare = numbers
      ? (a, b) => Number(key(a)) - Number(key(b))
      : (a, b) => key(a).localeCompare(key(b), "en", { numeric: true });
    const rows = [...body.rows].sort((a, b) => (down ? compare(b, a) : compare(a, b)));
    for (const other of title.parentElement.cells) other.removeAttribute("aria-sort");
    title.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows);
  });
}
