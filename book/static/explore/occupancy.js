// The occupancy explorer: a form, a sentence, and a bar for each budget of an SM.
"use strict";

(() => {
  const mount = document.querySelector('[data-explorer="occupancy"]');
  const INPUTS = [
    ["registers", "Registers per thread", 0, 255],
    ["shared", "Shared memory per block, bytes", 0, 232448],
    ["warps", "Warps per block", 1, 32],
  ];
  const RUNS_OUT = {
    threads: "Threads run out first",
    blocks: "Places for blocks run out first",
    registers: "Registers run out first",
    "shared memory": "Shared memory runs out first",
  };
  const number = (value) => value.toLocaleString("en");
  const named = (kernel) =>
    kernel.kernel + (kernel.num_stages > 1 ? `, ${kernel.num_stages} stages` : "");

  const input = ([id, label, least, most]) => `
    <div class="explore-field">
      <label for="explore-${id}">${label}</label>
      <input type="number" id="explore-${id}" min="${least}" step="1" required>
      <input type="range" data-for="${id}" aria-label="${label}, slider"
        min="${least}" max="${most}" step="1">
    </div>`;
  const choice = (id, label, options) => `
    <div class="explore-field">
      <label for="explore-${id}">${label}</label>
      <select id="explore-${id}">${options
        .map(([value, words]) => `<option value="${value}">${words}</option>`)
        .join("")}</select>
    </div>`;
  const gpus = Object.entries(EXPLORE.gpus).map(([key, gpu]) => [key, gpu.name]);
  const kernels = EXPLORE.kernels.map((kernel, place) => [place, named(kernel)]);
  mount.innerHTML = `
    <form class="explore-form" aria-label="A kernel and a GPU">
      ${choice("gpu", "GPU", gpus)}
      ${choice("kernel", "Start from", [...kernels, ["", "your own numbers"]])}
      ${INPUTS.map(input).join("")}
    </form>
    <div class="explore-card">
      <p class="explore-said" id="explore-fit" aria-live="polite"></p>
      <div id="explore-budgets"></div>
    </div>`;
  const form = mount.querySelector("form");
  const field = (id) => mount.querySelector(`#explore-${id}`);

  function bar(found, name) {
    const { blocks, limits, each, budgets } = found;
    const binds = limits[name] === blocks;
    const unit = name === "shared memory" ? " bytes" : "";
    const room = limits[name] === Infinity ? "any number" : limits[name];
    const wide = (100 * each[name]) / budgets[name];
    const block = `<span style="width: ${wide}%"></span>`;
    return `
      <div class="explore-budget${binds ? " explore-binds" : ""}">
        <p><b>${name}</b>: ${number(each[name])}${unit} of ${number(budgets[name])}
          for each block; room for ${room}${binds ? " <b>← the limit</b>" : ""}</p>
        <div class="explore-bar" aria-hidden="true">${block.repeat(blocks)}</div>
      </div>`;
  }

  function show() {
    const gpu = EXPLORE.gpus[field("gpu").value];
    const values = INPUTS.map(([id]) => field(id).valueAsNumber);
    for (const [id] of INPUTS)
      form.querySelector(`[data-for="${id}"]`).value = field(id).value;
    const [registers, shared, warps] = values;
    let found;
    try {
      found = residency(gpu, warps, registers, shared);
    } catch (error) {
      field("fit").textContent =
        "Type whole numbers: at least 1 for the warps, at least 0 for the others.";
      field("budgets").innerHTML = "";
      return;
    }
    const { blocks, limit, limits } = found;
    const most = gpu.threads_per_sm / gpu.warp_size;
    const percent = `${Number((100 * found.share).toFixed(1))} %`;
    const also = Object.keys(limits).filter((n) => limits[n] === blocks && n !== limit);
    field("fit").textContent = blocks
      ? `${blocks} ${blocks === 1 ? "block lives" : "blocks live"} on an SM of the ` +
        `${gpu.name}: ${found.warps} of ${most} warps, an occupancy of ${percent}. ` +
        `${RUNS_OUT[limit]}${also.length ? `, together with ${also.join(" and ")}` : ""}.`
      : `The kernel can't run on the ${gpu.name}: a block needs more ` +
        `${limit} than it can have.`;
    field("budgets").innerHTML = Object.keys(limits)
      .map((name) => bar(found, name))
      .join("");
  }

  function start(kernel) {
    for (const [id, value] of [
      ["registers", kernel.registers],
      ["shared", kernel.shared],
      ["warps", kernel.num_warps],
    ])
      field(id).value = value;
  }

  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("input", ({ target }) => {
    if (target.dataset.for) field(target.dataset.for).value = target.value;
    if (target.id === "explore-kernel") {
      if (target.value !== "") start(EXPLORE.kernels[target.value]);
    } else if (target.id !== "explore-gpu") field("kernel").value = "";
    show();
  });
  const first = EXPLORE.kernels.findIndex(({ kernel }) => kernel.startsWith("strided."));
  field("gpu").value = "H200";
  field("kernel").value = String(first);
  start(EXPLORE.kernels[first]);
  show();
  mount.parentElement.classList.add("explore-live");
})();
