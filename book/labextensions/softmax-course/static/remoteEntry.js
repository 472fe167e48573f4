// What JupyterLab lacks and the book has: alternative text for figures, which stands in
// a cell's metadata, and two colours for the added and removed lines of a diff. Both as
// JupyterLab shows them, so that no output has to hold them. `make lab` loads this file:
// an extension that needs no build, in the form that JupyterLab expects.
//
// Weighed: outputs in HTML, with styles of their own (they would stand in every diff of
// a notebook, and in the book twice); an extension from JupyterLab's template (a build by
// npm for 50 lines).

const COLOURS = {
  "+": "rgb(0 114 178 / 18%)", // added
  "-": "rgb(213 94 0 / 18%)", // removed
};

function describe(notebook) {
  for (const cell of notebook.widgets) {
    const alt = cell.model.getMetadata("mystnb")?.image?.alt;
    for (const image of alt ? cell.node.querySelectorAll(".jp-OutputArea img") : []) {
      image.alt = alt;
    }
  }
}

function colour(code) {
  const lines = code.textContent.split("\n").map((text) => {
    const line = document.createElement("span");
    line.textContent = text + "\n";
    line.style.background = COLOURS[text[0]] ?? "";
    return line;
  });
  code.replaceChildren(...lines);
  code.dataset.coloured = "";
}

const plugin = {
  id: "softmax-course:plugin",
  autoStart: true,
  activate(app) {
    const look = () => {
      for (const widget of app.shell.widgets("main")) {
        if (widget.content?.widgets && widget.context) describe(widget.content);
      }
      const diffs = "pre > code.language-diff:not([data-coloured])";
      document.querySelectorAll(diffs).forEach(colour);
    };
    const page = new MutationObserver(() => requestAnimationFrame(look));
    page.observe(document.body, { childList: true, subtree: true });
  },
};

(window._JUPYTERLAB ??= {})["softmax-course"] = {
  init() {},
  get: async () => () => ({ default: plugin, __esModule: true }),
};
