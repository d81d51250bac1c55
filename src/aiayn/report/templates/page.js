"use strict";
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const rising = head.getAttribute("aria-sort") !== "ascending";
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", rising ? "ascending" : "descending");
    const value = (row) => row.cells[column].dataset.value;
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");  // what is missing comes last either way
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return rising ? order : -order;
    });
    body.append(...rows);
  }));
}
for (const row of document.querySelectorAll("tr[data-opens]")) {
  row.addEventListener("click", () => document.getElementById(row.dataset.opens).showModal());
}
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
}
const switches = [...document.querySelectorAll("input[data-row]")];
const show = () => switches.forEach((box) => document.querySelectorAll(`main .row-${CSS.escape(box.dataset.row)}`)
  .forEach((drawn) => drawn.classList.toggle("off", !box.checked)));
switches.forEach((box) => box.addEventListener("change", show));
for (const button of document.querySelectorAll("button[data-group]")) {
  button.addEventListener("click", () => {
    const group = button.dataset.group;
    switches.forEach((box) => { box.checked = group === "all" || box.dataset.group === group || (group !== "none" && box.dataset.row === "base"); });
    show();
  });
}
for (const choice of document.querySelectorAll("input[name=axis]")) {
  choice.addEventListener("change", () => document.querySelectorAll("figure[data-axis]")
    .forEach((figure) => figure.classList.toggle("off", figure.dataset.axis !== choice.value)));
}
