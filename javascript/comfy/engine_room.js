// Engine Room in ComfyUI's frontend: reports on the nodes, and a sidebar with the engines.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const REPORTING = new Set(["EngineRoomBuild", "EngineRoomExport", "EngineRoomCompare"]);
const REFRESH_MS = 2000;

function showReport(node, text) {
  let widget = node.widgets?.find((item) => item.name === "engine_room_report");
  if (!widget) {
    const box = document.createElement("textarea");
    box.readOnly = true;
    box.setAttribute("aria-label", "Report");
    box.className = "comfy-multiline-input";
    widget = node.addDOMWidget("engine_room_report", "text", box, { serialize: false });
  }
  widget.element.value = text;
  node.setDirtyCanvas?.(true, true);
}

// A node inside subgraphs has the ids of its owners before its own: "12:3".
function findNode(id) {
  let graph = app.graph;
  let node = null;
  for (const part of String(id).split(":")) {
    node = graph?.getNodeById(Number(part));
    graph = node?.subgraph;
  }
  return node;
}

function element(kind, text, parent) {
  const made = document.createElement(kind);
  made.textContent = text ?? "";
  parent?.append(made);
  return made;
}

async function post(path, body) {
  const answer = await api.fetchApi(`/engine_room/${path}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body ?? {}),
  });
  return answer.json();
}

// What the sidebar says about an engine, in words.
function factsOf(engine) {
  const facts = [engine.text, `${(engine.bytes / 1e6).toFixed(1)} MB`];
  if (engine.loaded) {
    facts.push("in memory");
  }
  if (engine.speed) {
    facts.push(`${engine.speed.toFixed(1)} times as fast as the host`);
  }
  if (Number.isFinite(engine.last_used)) {
    facts.push(`last used ${new Date(1000 * engine.last_used).toLocaleString()}`);
  }
  return facts;
}

class Panel {
  constructor(root) {
    this.root = root;
    root.style.cssText = "padding:10px;overflow:auto;height:100%;font-size:13px";
    root.id = "engine-room-panel";
    this.body = element("div", "", root);
    this.note = element("p", "", root);
    this.note.setAttribute("role", "status");
    this.doctor();
    this.refresh();
    this.timer = setInterval(() => this.tick(), REFRESH_MS);
  }

  doctor() {
    const report = document.createElement("textarea");
    report.readOnly = true;
    report.hidden = true;
    report.rows = 14;
    report.style.width = "100%";
    report.setAttribute("aria-label", "What the doctor found");
    const start = element("button", "Doctor: examine this machine", this.root);
    start.onclick = async () => {
      start.disabled = true;
      report.hidden = false;
      report.value = "Examining; a test engine takes some seconds ...";
      try {
        report.value = (await post("doctor")).lines.join("\n");
      } catch (error) {
        report.value = `The doctor does not answer: ${error.message}`;
      }
      start.disabled = false;
      report.select();
    };
    this.root.append(report);
  }

  tick() {
    if (!this.root.isConnected) {
      clearInterval(this.timer);
    } else {
      this.refresh();
    }
  }

  async refresh() {
    try {
      const answer = await api.fetchApi("/engine_room/status");
      this.show(await answer.json());
    } catch (error) {
      this.note.textContent = `Engine Room does not answer: ${error.message}`;
    }
  }

  show(status) {
    const view = document.createElement("div");
    element("h3", "Engine Room", view);
    const total = status.served + status.host;
    element("p", `${status.gpu}; engines served ${status.served} of ${total} UNet calls.`, view);
    for (const text of [status.unable, status.installing || status.installed]) {
      if (text) {
        element("p", text, view).style.fontWeight = "bold";
      }
    }
    const missing = !Object.keys(status.backends).some((name) => name.startsWith("tensorrt"));
    if (missing && status.gpu !== "CPU" && !status.installing) {
      this.button(view, "Install TensorRT (up to 1 GB)", () => post("install"));
    }
    this.list(view, "By the host", status.reasons.map((r) => `${r.count}: ${r.text}`));
    this.progress(view, status.wanted, status.progress);
    this.list(view, "Failed", Object.entries(status.failed).map(([id, why]) => `${id}: ${why}`));
    if (status.wanted.length) {
      this.button(view, "Cancel builds", () => post("cancel"));
    }
    element("h4", `Engines (${status.engines.length})`, view);
    for (const engine of status.engines) {
      const row = element("div", "", view);
      row.style.cssText = "border-top:1px solid currentColor;padding:6px 0";
      element("div", engine.label || engine.id, row).style.fontWeight = "bold";
      element("div", factsOf(engine).join(", "), row);
      this.button(row, "Delete", () => post("remove", { id: engine.id }), engine.label);
    }
    this.body.replaceChildren(view);
  }

  progress(view, wanted, moments) {
    if (!wanted.length) {
      return;
    }
    element("h4", "Being made ready", view);
    for (const id of wanted) {
      const moment = moments[id];
      const left = moment?.remaining ? `, about ${Math.ceil(moment.remaining)} s left` : "";
      const words = moment ? `${moment.label}: ${moment.phase}${left}` : `${id}: waits`;
      element("div", words, view);
      if (moment && moment.fraction !== null) {
        const bar = element("progress", "", view);
        bar.value = moment.fraction;
        bar.style.width = "100%";
        bar.setAttribute("aria-label", words);
      }
    }
  }

  list(view, title, lines) {
    if (lines.length) {
      element("h4", title, view);
      const items = element("ul", "", view);
      lines.forEach((line) => element("li", line, items));
    }
  }

  button(parent, text, action, label) {
    const made = element("button", text, parent);
    made.setAttribute("aria-label", label ? `${text} ${label}` : text);
    made.onclick = async () => {
      const answer = await action();
      this.note.textContent = answer.error ? answer.error.message : "";
      await this.refresh();
    };
  }
}

app.registerExtension({
  name: "EngineRoom",
  beforeRegisterNodeDef(nodeType, nodeData) {
    if (!REPORTING.has(nodeData.name)) {
      return;
    }
    const before = nodeType.prototype.onExecuted;
    nodeType.prototype.onExecuted = function (message) {
      before?.apply(this, arguments);
      if (message?.text) {
        showReport(this, message.text.join("\n"));
      }
    };
  },
  setup() {
    api.addEventListener("engine_room.report", ({ detail }) => {
      const node = findNode(detail.node);
      if (node) {
        showReport(node, detail.text);
      }
    });
    app.extensionManager?.registerSidebarTab?.({
      id: "engine-room",
      icon: "pi pi-bolt",
      title: "Engines",
      tooltip: "TensorRT engines of Engine Room",
      type: "custom",
      render: (root) => new Panel(root),
    });
  },
});
