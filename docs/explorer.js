// The page of results: rows of a table, filtered by menus and words, sorted by a click on a column's head.
const MOST = 200; // rows shown at once

document$.subscribe(async () => {
  const place = document.getElementById("explorer");
  if (!place || place.childElementCount) return;
  const tables = await (await fetch(place.dataset.rows)).json();
  const state = { table: Object.keys(tables)[0], chosen: {}, words: "", by: null, down: false };

  const element = (tag, attributes = {}, ...children) => {
    const made = Object.assign(document.createElement(tag), attributes);
    made.append(...children);
    return made;
  };
  const menu = (label, values, value, change) => {
    const select = element("select", { onchange: (e) => change(e.target.value) });
    select.append(...values.map((v) => element("option", { value: v, textContent: v, selected: v === value })));
    return element("label", {}, `${label} `, select);
  };

  function found(table) {
    const words = state.words.toLowerCase().split(/\s+/).filter(Boolean);
    const rows = table.rows.filter((row) =>
      Object.entries(state.chosen).every(([column, value]) => row[table.columns.indexOf(column)] === value)
      && words.every((word) => row.join(" ").toLowerCase().includes(word)));
    if (state.by === null) return rows;
    const sign = state.down ? -1 : 1;
    const last = sign * Infinity; // a row without a value comes last
    return [...rows].sort((a, b) => {
      const [x, y] = [a[state.by] ?? last, b[state.by] ?? last];
      return sign * (typeof x === "number" && typeof y === "number" ? (x === y ? 0 : x - y) : String(x).localeCompare(String(y)));
    });
  }

  function lines() {
    const table = tables[state.table];
    const rows = found(table);
    const number = (i) => table.rows.some((row) => typeof row[i] === "number");
    const heads = table.columns.map((name, i) => element("th", {
      textContent: name + (state.by === i ? (state.down ? " ↓" : " ↑") : ""),
      onclick: () => { state.down = state.by === i && !state.down; state.by = i; show(); },
    }));
    const body = rows.slice(0, MOST).map((row) => element("tr", {}, ...row.map((cell, i) =>
      element("td", { textContent: cell ?? "–", style: number(i) ? "text-align: right" : "" }))));
    const count = `${rows.length} of ${table.rows.length} rows` + (rows.length > MOST ? `, the first ${MOST} shown` : "");
    return [
      element("p", { textContent: count }),
      element("div", { className: "md-typeset__scrollwrap" }, element("div", { className: "md-typeset__table" },
        element("table", {}, element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...body)))),
    ];
  }

  const output = element("div");
  const show = () => output.replaceChildren(...lines());

  function build() {
    const table = tables[state.table];
    const menus = table.filtered.map((column) => {
      const i = table.columns.indexOf(column);
      const values = [...new Set(table.rows.map((row) => row[i]))].sort();
      return menu(column, ["all", ...values], "all", (value) => {
        if (value === "all") delete state.chosen[column]; else state.chosen[column] = value;
        show();
      });
    });
    const words = element("input", { type: "search", placeholder: "words, such as causal d=128", value: state.words,
      oninput: (e) => { state.words = e.target.value; show(); } });
    const which = menu("table", Object.keys(tables), state.table, (value) => {
      Object.assign(state, { table: value, chosen: {}, by: null });
      build();
    });
    place.replaceChildren(element("div", { className: "filters" }, which, ...menus, words), output);
    show();
  }
  build();
});
