// The benchmark's explorer: what to draw, the figure, and the row under the pointer.
"use strict";

(() => {
  const mount = document.querySelector('[data-explorer="benchmark"]');
  const OURS = ["fastest", "gradient"];
  const INK = "#1f2430";
  const QUIET = "#5b6270";
  const KINDS = [
    ["even", "divisible by 8", (n) => n % 8 === 0],
    ["odd", "not divisible by 8", (n) => n % 8 !== 0],
    ["all", "all", () => true],
  ];
  const LAYOUTS = { sliced: "rows of a wider matrix", pair: "two matrices" };
  const number = (value) => value.toLocaleString("en");
  const size = (bytes) =>
    bytes < 2 ** 20
      ? `${Number((bytes / 2 ** 10).toPrecision(3))} KiB`
      : `${Number((bytes / 2 ** 20).toPrecision(3))} MiB`;

  const choice = (id, label) => `
    <div class="explore-field">
      <label for="explore-${id}">${label}</label>
      <select id="explore-${id}"></select>
    </div>`;
  mount.innerHTML = `
    <form class="explore-form" aria-label="What to draw">
      ${choice("file", "Measurements")}
      ${choice("dtype", "dtype")}
      ${choice("size", "Matrices")}
      ${choice("layout", "Rows")}
      ${choice("kind", "Row lengths, N")}
      ${choice("from", "N from")}
      ${choice("to", "N to")}
      ${choice("measure", "Up the side")}
      <fieldset><legend>Providers</legend><div id="explore-providers"></div></fieldset>
    </form>
    <div class="explore-card">
      <div id="explore-figure" tabindex="0" role="application"
        aria-roledescription="figure" aria-describedby="explore-keys"></div>
      <p class="explore-keys" id="explore-keys">Arrow keys: left and right to another N,
        up and down to another provider.</p>
      <p class="explore-said" id="explore-row" aria-live="polite"></p>
    </div>
    <label class="explore-check"><input type="checkbox" id="explore-numbers"
      aria-controls="explore-table"> The drawn numbers as a table</label>
    <div class="explore-table" id="explore-table" tabindex="0" role="region"
      aria-label="The drawn numbers" hidden></div>`;
  const form = mount.querySelector("form");
  const field = (id) => mount.querySelector(`#explore-${id}`);
  const figure = field("figure");

  let file, rows, groups, drawn, chart, current, cut;

  // Fills a list, and keeps what was chosen where it is still there.
  function fill(id, options, otherwise) {
    const before = field(id).value;
    const values = options.map(([value]) => String(value));
    field(id).replaceChildren(...options.map(([value, words]) => new Option(words, value)));
    field(id).value =
      [before, String(otherwise)].find((value) => values.includes(value)) ?? values[0];
    field(id).parentElement.hidden = options.length < 2;
  }

  const distinct = (list) => [...new Set(list)];
  const as = (list, words = String) => list.map((value) => [value, words(value)]);

  function open() {
    file = EXPLORE.files[field("file").value];
    rows = measurements(d3.csvParse(file.csv), file.yardstick);
    fill("measure", [
      ["share", `share of the ${file.yardstick}'s speed`],
      ["p50_us", "time in µs"],
    ]);
    const names = distinct(rows.map((row) => row.provider));
    field("providers").innerHTML = names
      .map((name) => {
        const { colour, symbol, label } = file.styles[name];
        const path = d3.symbol(d3[`symbol${symbol}`], 70)();
        const stroke = stroked(symbol) ? `stroke="${colour}" fill="none"` : "";
        return `<label><input type="checkbox" value="${name}"${file.shown.includes(name) ? " checked" : ""}>
          <svg class="explore-mark" viewBox="-9 -9 18 18" width="18" height="18"
            aria-hidden="true"><path d="${path}" fill="${colour}" stroke-width="2"
            ${stroke}/></svg> ${label}</label>`;
      })
      .join("");
    const order = ["bfloat16", "float32", "float16"];
    const dtypes = distinct(rows.map((row) => row.dtype));
    fill("dtype", as(dtypes.sort((a, b) => order.indexOf(a) - order.indexOf(b))));
    narrow();
  }

  const stroked = (symbol) => ["Times", "Plus", "Asterisk", "Diamond2"].includes(symbol);

  // The lists that depend on the choices above them.
  function narrow() {
    const ofDtype = rows.filter((row) => row.dtype === field("dtype").value);
    groups = Object.fromEntries(
      groupings(ofDtype).map((group) => [`${group.by} ${group.value}`, group]),
    );
    groups.all = { by: "all", value: 0, matches: () => true };
    const words = ({ by, value }) =>
      ({
        bytes: `of ${size(value)} each`,
        rows: `of M = ${number(value)} ${value === 1 ? "row" : "rows"}`,
        all: "all that were measured (marks only)",
      })[by];
    fill("size", Object.entries(groups).map(([key, group]) => [key, words(group)]));
    const ofSize = ofDtype.filter(groups[field("size").value].matches);
    const others = distinct(
      ofSize.filter((row) => row.provider !== file.yardstick).map((row) => row.input),
    );
    fill("layout", as(others, (name) => LAYOUTS[name] ?? name), "contiguous");
    const layout = field("layout").value;
    const inLayout = ofSize.filter((row) => row.input === layout);
    const has = (isOne) => inLayout.some((row) => isOne(row.n_cols));
    const kinds = KINDS.filter(([, , isOne]) => has(isOne));
    fill("kind", kinds.length === KINDS.length ? kinds : kinds.slice(-1));
    const [, , isOne] = KINDS.find(([kind]) => kind === field("kind").value);
    const ofKind = (list) => list.filter((row) => isOne(row.n_cols));
    cut = ofKind(
      ofSize.filter((row) => row.provider === file.yardstick || row.input === layout),
    );
    const lengths = distinct(ofKind(inLayout).map((row) => row.n_cols));
    const used = lengths.sort((a, b) => a - b);
    fill("from", as(used, number));
    fill("to", as(used, number), used.at(-1));
    draw();
  }

  function draw() {
    const measure = field("measure").value;
    const [from, to] = [Number(field("from").value), Number(field("to").value)];
    const names = [...form.querySelectorAll(":checked[type=checkbox]")].map(
      (box) => box.value,
    );
    drawn = cut
      .filter((row) => row.n_cols >= Math.min(from, to))
      .filter((row) => row.n_cols <= Math.max(from, to))
      .filter((row) => names.includes(row.provider) && !Number.isNaN(row[measure]));
    drawn.sort((a, b) => a.n_cols - b.n_cols || a.n_rows - b.n_rows);
    const look = names.map((name) => file.styles[name]);
    const share = measure === "share";
    const marks = [
      share ? Plot.ruleY([1], { stroke: QUIET, strokeDasharray: "5 4" }) : null,
      field("size").value === "all"
        ? null
        : Plot.lineY(drawn, { x: "n_cols", y: measure, stroke: "provider", z: "provider" }),
    ];
    for (const name of names) {
      const { colour, symbol } = file.styles[name];
      const own = drawn.filter((row) => row.provider === name);
      const paint = stroked(symbol) ? { stroke: colour } : { fill: colour };
      const place = { x: "n_cols", y: measure, r: 4, symbol: d3[`symbol${symbol}`] };
      marks.push(Plot.dot(own, { ...place, ...paint }));
    }
    chart = Plot.plot({
      width: Math.max(280, figure.clientWidth),
      height: 390,
      marginBottom: 42,
      marginLeft: 52,
      marginRight: 16,
      marginTop: 28,
      style: { background: "none", color: INK, fontSize: "13px", overflow: "visible" },
      x: { type: "log", label: "columns, N", labelOffset: 38, tickFormat: "~s", ticks: 6 },
      y: share
        ? { label: `share of the ${file.yardstick}'s speed`, grid: true, zero: true }
        : { type: "log", label: "µs", grid: true, tickFormat: "~s", ticks: 6 },
      color: { domain: names, range: look.map(({ colour }) => colour) },
      marks,
    });
    chart.setAttribute("aria-hidden", "true");
    figure.replaceChildren(drawn.length ? chart : "Nothing was measured here.");
    figure.setAttribute(
      "aria-label",
      `${file.title}, ${field("dtype").value}: ${drawn.length} measurements`,
    );
    tabulate(names, measure);
    const before = current;
    current = drawn.find((row) => row === before);
    current ??= drawn.find((row) => OURS.includes(row.provider)) ?? drawn[0];
    mark();
  }

  function tabulate(names, measure) {
    const digits = measure === "share" ? 3 : 1;
    const lines = d3.groups(drawn, (row) => `${row.n_rows} × ${row.n_cols}`);
    const cell = (of, name) =>
      of.find((row) => row.provider === name)?.[measure].toFixed(digits) ?? "–";
    const head = names.map((name) => `<th scope="col">${file.styles[name].label}</th>`);
    field("table").innerHTML = `<table class="table"><thead><tr><th scope="col">M × N</th>
      ${head.join("")}</tr></thead><tbody>${lines
        .map(([shape, of]) => `<tr><th scope="row">${shape}</th>${names
          .map((name) => `<td>${cell(of, name)}</td>`)
          .join("")}</tr>`)
        .join("")}</tbody></table>`;
  }

  const place = (row) => [
    chart.scale("x").apply(row.n_cols),
    chart.scale("y").apply(row[field("measure").value]),
  ];

  // Shows the current row: a ring around its mark, and a sentence.
  function mark() {
    chart.querySelector(".explore-ring")?.remove();
    field("row").textContent = current ? sentence(current) : "";
    if (!current) return;
    const [x, y] = place(current);
    d3.select(chart).append("circle").attr("class", "explore-ring")
      .attr("cx", x).attr("cy", y).attr("r", 9).attr("fill", "none")
      .attr("stroke", INK).attr("stroke-width", 2);
  }

  function sentence(row) {
    const gbps = (2 * row.bytes) / row.p50_us / 1e3;
    const version = file.versions[row.provider];
    const speed = row.provider === file.yardstick
      ? ""
      : `${row.share.toFixed(3)} of the ${file.yardstick}'s speed. `;
    const bandwidth = file.yardstick === "copy" ? ` (${number(Math.round(gbps))} GB/s)` : "";
    const layout = row.input in LAYOUTS ? `, ${LAYOUTS[row.input]}` : "";
    return `${file.styles[row.provider].label}${version ? ` ${version}` : ""}: ` +
      `${number(row.n_rows)} × ${number(row.n_cols)} ${row.dtype}, ${size(row.bytes)}` +
      `${layout}. ${row.p50_us} µs${bandwidth}; 20th and 80th percentile ` +
      `${row.p20_us} and ${row.p80_us} µs. ${speed}${row.gpu}, driver ${row.driver}, ` +
      `PyTorch ${row.torch}, Triton ${row.triton}, ${row.recorded_at}, ` +
      `commit ${row.commit}.`;
  }

  function nearest(event) {
    if (!drawn.length) return;
    const [x, y] = d3.pointer(event, chart);
    current = d3.least(drawn, (row) => Math.hypot(place(row)[0] - x, place(row)[1] - y));
    mark();
  }

  function step(event) {
    const { provider, n_cols } = current ?? {};
    const own = drawn.filter((row) => row.provider === provider);
    const at = own.indexOf(current);
    const column = drawn
      .filter((row) => row.n_cols === n_cols && row.n_rows === current.n_rows)
      .sort((a, b) => place(b)[1] - place(a)[1]);
    const next = {
      ArrowLeft: own[at - 1],
      ArrowRight: own[at + 1],
      ArrowUp: column[column.indexOf(current) + 1],
      ArrowDown: column[column.indexOf(current) - 1],
      Home: own[0],
      End: own.at(-1),
    };
    if (!current || !(event.key in next)) return;
    event.preventDefault();
    event.stopPropagation();
    current = next[event.key] ?? current;
    mark();
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("change", ({ target }) => {
    if (target.id === "explore-file") open();
    else if (["dtype", "size", "layout", "kind"].some((id) => target === field(id))) narrow();
    else draw();
  });
  field("numbers").addEventListener("change", ({ target }) => {
    field("table").hidden = !target.checked;
  });
  figure.addEventListener("pointermove", nearest);
  figure.addEventListener("pointerdown", nearest);
  figure.addEventListener("keydown", step);
  const several = distinct(EXPLORE.files.map(({ gpu }) => gpu)).length > 1;
  fill("file", EXPLORE.files.map(({ title, gpu }, i) => [i, several ? `${title} (${gpu})` : title]));
  mount.parentElement.classList.add("explore-live");
  try {
    open();
  } catch (error) {
    mount.parentElement.classList.remove("explore-live");
    mount.replaceChildren();
    throw error;
  }
  let width = figure.clientWidth;
  new ResizeObserver(() => {
    if (figure.clientWidth !== width) draw();
    width = figure.clientWidth;
  }).observe(figure);
})();
