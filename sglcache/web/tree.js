// The radix tree as an icicle: depth in tokens from left to right, a branch as high as it has pages.
//
// A picture (GET /api/tree) has the largest branches, at most as many nodes as can be seen; what of a node is not among
// them is drawn as one hatched rest. Rows are arrays, in the order of `ROW`. A place is kept by a node's name, so that what
// is selected stays so while the tree changes, and what moves is seen to move.

export const ROW = {
  name: 0, parent: 1, pages: 2, present: 3, writing: 4, deviceLocks: 5, hostLocks: 6, children: 7,
  total: 8, device: 9, host: 10, age: 11, idle: 12,
};
const GUTTER = 16; // px, where namespaces stand
const MOVE_MS = 240;
const OLD_S = 3600; // what was not used for so long is as pale as it gets

const number = new Intl.NumberFormat("en-US");
export const count = (value) => number.format(value);

export function tierOf(present, cells = 2) {
  const device = present & 1, host = cells > 1 && present & 2;
  return device && host ? "both" : device ? "device" : host ? "host" : "bare";
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 10) return `${value.toFixed(1)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  if (value < 172800) return `${Math.round(value / 3600)} h`;
  return `${Math.round(value / 86400)} d`;
}

// Pale with the time since the last use, in steps of the logarithm.
const freshness = (idle) => 1 - 0.62 * Math.min(1, Math.log1p(Math.max(0, idle)) / Math.log1p(OLD_S));

export class Tree {
  constructor(canvas, on) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.on = on; // select(item), enter(name), out(), hover(item, x, y)
    this.items = [];
    this.byName = new Map();
    this.picture = null;
    this.selected = null; // a name
    this.hovered = null;
    this.sqrt = true;
    this.frames = 0;
    this.view = { x0: 0, x1: 1, y0: 0, y1: 1 };
    this.pageSize = 1;
    this.wanted = false;
    this.started = 0;
    this.theme();
    new ResizeObserver(() => this.resize()).observe(canvas);
    this.resize();
    this.listen();
  }

  // -- what there is ----------------------------------------------------------------------------------

  show(picture, pageSize) {
    const before = this.byName;
    this.picture = picture;
    this.pageSize = pageSize;
    const spaces = new Map(picture.spaces.map(([row, ...names]) => [row, names]));
    const items = picture.rows.map((row, at) => ({
      at, row, name: row[ROW.name], parent: null, children: [], space: spaces.get(at) || null, rest: 0, branches: 0,
    }));
    const top = { children: [], depth: picture.before, end: picture.before };
    for (const item of items) {
      const parent = item.row[ROW.parent] < 0 ? top : items[item.row[ROW.parent]];
      item.parent = parent === top ? null : parent;
      parent.children.push(item);
      item.depth = parent.end;
      item.end = item.depth + item.row[ROW.pages];
    }
    // A branch is as high as it has pages; where the tree changed while it was counted, as high as what is drawn of it.
    for (let at = items.length - 1; at >= 0; at--) {
      const item = items[at], drawn = item.children.reduce((sum, child) => sum + child.size, 0);
      item.size = Math.max(item.row[ROW.total], drawn + item.row[ROW.pages]);
      item.rest = item.size - drawn - item.row[ROW.pages];
      item.branches = Math.max(0, item.row[ROW.children] - item.children.length);
      item.children.sort((one, other) => other.size - one.size);
    }
    const shown = top.children.reduce((sum, child) => sum + child.size, 0);
    this.whole = Math.max(picture.pages[0], shown) || 1;
    this.otherSpaces = picture.root === null ? { spaces: picture.num_spaces - picture.num_roots, pages: this.whole - shown } : null;
    this.first = picture.before;
    this.last = items.reduce((most, item) => Math.max(most, item.end), this.first + 1);
    this.top = top;
    this.items = items;
    this.byName = new Map(items.map((item) => [item.name, item]));
    top.children.sort((one, other) => other.size - one.size);
    this.place();
    const still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    for (const item of items) {
      const old = still ? null : before.get(item.name);
      item.from = old ? { ...old.now } : { ...item.to };
      item.now = { ...item.from };
    }
    this.started = performance.now();
    this.draw();
  }

  along(depth) {
    const share = (depth - this.first) / (this.last - this.first);
    return this.sqrt ? Math.sqrt(Math.max(0, share)) : share;
  }

  place() {
    let at = 0;
    for (const item of this.top.children) {
      item.to = { y0: at / this.whole, y1: (at + item.size) / this.whole };
      at += item.size;
    }
    for (const item of this.items) {
      item.to.x0 = this.along(item.depth);
      item.to.x1 = this.along(item.end);
      // A node's own pages have their share of its height, too: its children take what is left, side by side.
      const inner = item.size - item.row[ROW.pages] || 1;
      let y = item.to.y0;
      for (const child of item.children) {
        const high = (child.size / inner) * (item.to.y1 - item.to.y0);
        child.to = { y0: y, y1: y + high };
        y += high;
      }
      item.restFrom = y;
    }
  }

  clear() {
    this.items = [];
    this.byName = new Map();
    this.picture = null;
    this.draw();
  }

  get budget() { // nodes that can be told apart on a canvas of this height
    return Math.max(200, Math.min(1500, Math.round(this.height * 2)));
  }

  largest(most) {
    return [...this.items].filter((item) => item.row[ROW.pages] > 0).sort((one, other) => other.size - one.size).slice(0, most);
  }

  select(name, tell = true) {
    this.selected = name;
    this.draw();
    if (tell) this.on.select(name === null ? null : this.byName.get(name) || null);
  }

  // -- drawing ----------------------------------------------------------------------------------------

  theme() {
    const style = getComputedStyle(document.documentElement);
    const color = (name) => style.getPropertyValue(`--${name}`).trim();
    this.colors = Object.fromEntries(
      ["device", "host", "both", "bare", "rest", "locked", "ink", "muted", "panel", "line", "on", "focus", "fade"].map((name) => [name, color(name)]),
    );
    this.hatches = {};
    this.draw();
  }

  hatch(kind) {
    if (this.hatches[kind]) return this.hatches[kind];
    const tile = document.createElement("canvas");
    tile.width = tile.height = 8;
    const at = tile.getContext("2d");
    at.strokeStyle = kind === "rest" ? this.colors.rest : this.colors.panel;
    at.lineWidth = kind === "rest" ? 1.5 : 1.6;
    at.globalAlpha = kind === "rest" ? 1 : 0.42;
    at.beginPath();
    if (kind === "host" || kind === "rest") {
      for (const shift of [-8, 0, 8]) { at.moveTo(shift, 8); at.lineTo(shift + 8, 0); }
    } else { // both
      at.arc(2, 2, 0.6, 0, 7); at.moveTo(6.6, 6); at.arc(6, 6, 0.6, 0, 7);
    }
    at.stroke();
    return (this.hatches[kind] = this.context.createPattern(tile, "repeat"));
  }

  resize() {
    const ratio = devicePixelRatio || 1, box = this.canvas.getBoundingClientRect();
    this.width = Math.max(40, box.width);
    this.height = Math.max(40, box.height);
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.ratio = ratio;
    this.draw();
  }

  draw() {
    if (this.wanted) return;
    this.wanted = true;
    requestAnimationFrame((time) => { this.wanted = false; this.frame(time); });
  }

  frame(time) {
    this.frames += 1;
    const share = Math.min(1, Math.max(0, (time - this.started) / MOVE_MS)), eased = 1 - (1 - share) ** 3;
    const at = this.context, { view, colors } = this;
    at.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    at.clearRect(0, 0, this.width, this.height);
    const wide = this.width - GUTTER - 6, high = this.height;
    this.toX = (x) => GUTTER + ((x - view.x0) / (view.x1 - view.x0)) * wide;
    this.toY = (y) => ((y - view.y0) / (view.y1 - view.y0)) * high;
    at.font = "11px system-ui, sans-serif";
    at.textBaseline = "middle";
    for (const item of this.items) {
      const { from, to, now } = item;
      for (const side of ["x0", "x1", "y0", "y1"]) now[side] = from[side] + (to[side] - from[side]) * eased;
      const y0 = this.toY(now.y0), y1 = this.toY(now.y1);
      if (y1 < 0 || y0 > high) continue;
      let x0 = this.toX(now.x0), x1 = this.toX(now.x1);
      if (item.row[ROW.pages] === 0) { x0 = 0; x1 = GUTTER - 3; }
      if (x0 > this.width) continue;
      item.box = { x0, x1: Math.max(x1, x0 + 1), y0, y1 };
      this.paint(at, item, item.box);
      if (item.rest > 0) this.paintRest(at, item, x1, this.toY(item.restFrom + (now.y0 - to.y0)), y1);
    }
    if (this.otherSpaces && this.otherSpaces.spaces > 0) {
      const last = this.top.children.at(-1), y0 = last ? this.toY(last.now.y1) : 0;
      at.fillStyle = this.hatch("rest");
      at.fillRect(0, y0, this.width, this.toY(1) - y0);
      this.label(at, `+ ${count(this.otherSpaces.pages)} pages in ${count(this.otherSpaces.spaces)} more namespaces`, { x0: GUTTER, x1: this.width, y0, y1: this.toY(1) }, colors.ink);
    }
    const chosen = this.selected === null ? null : this.byName.get(this.selected);
    if (chosen && chosen.box) this.outline(at, chosen, colors.focus, 2.5);
    if (this.hovered && this.hovered.box && this.hovered !== chosen) this.outline(at, this.hovered, colors.ink, 1);
    if (share < 1) this.draw();
  }

  outline(at, item, color, wide) {
    const { x0, x1, y0, y1 } = item.box;
    at.strokeStyle = color;
    at.lineWidth = wide;
    at.strokeRect(x0 + wide / 2, y0 + wide / 2, Math.max(2, x1 - x0 - wide), Math.max(2, y1 - y0 - wide));
  }

  paint(at, item, { x0, x1, y0, y1 }) {
    const { row } = item, { colors } = this;
    const gap = y1 - y0 > 4 ? 1 : y1 - y0 > 2 ? 0.5 : 0;
    const wide = Math.max(1, x1 - x0 - (x1 - x0 > 4 ? 1 : 0)), high = Math.max(0.5, y1 - y0 - gap);
    const tier = tierOf(row[ROW.present], this.tiers);
    const space = row[ROW.pages] === 0;
    at.globalAlpha = space ? 0.55 : freshness(row[ROW.idle]);
    at.fillStyle = colors[tier];
    at.fillRect(x0, y0, wide, high);
    at.globalAlpha = 1;
    if (high > 3 && (tier === "host" || tier === "both")) {
      at.fillStyle = this.hatch(tier);
      at.fillRect(x0, y0, wide, high);
    }
    if (row[ROW.writing] && high > 2) {
      at.strokeStyle = colors.host;
      at.setLineDash([4, 3]);
      at.lineWidth = 1.5;
      at.strokeRect(x0 + 1, y0 + 1, Math.max(1, wide - 2), Math.max(1, high - 2));
      at.setLineDash([]);
    }
    if (!space && (row[ROW.deviceLocks] || row[ROW.hostLocks])) {
      at.fillStyle = colors.locked;
      at.fillRect(x0, y0, Math.min(3, wide), high);
    }
    if (space) this.labelSpace(at, item);
    else if (wide > 34 && high > 11) {
      const tokens = count(row[ROW.pages] * this.pageSize);
      const more = row[ROW.deviceLocks] ? ` · ${row[ROW.deviceLocks]} lock${row[ROW.deviceLocks] > 1 ? "s" : ""}` : "";
      const pale = freshness(row[ROW.idle]) < 0.62;
      this.label(at, `${tokens}${wide > 90 ? " tokens" : ""}${wide > 150 ? more : ""}`, item.box, pale ? colors.ink : tier === "host" ? "#1d1500" : colors.on);
    }
  }

  paintRest(at, item, x0, y0, y1) {
    if (y1 - y0 < 3 || x0 > this.width) return;
    const x1 = Math.min(this.width, x0 + Math.max(24, (this.width - x0) * 0.25));
    at.fillStyle = this.hatch("rest");
    at.fillRect(x0, y0, x1 - x0, y1 - y0 - 1);
    if (y1 - y0 > 13) {
      const where = item.branches ? ` in ${count(item.branches)} branch${item.branches > 1 ? "es" : ""}` : "";
      this.label(at, `+ ${count(item.rest)} pages${where}`, { x0, x1: this.width, y0, y1 }, this.colors.muted);
    }
  }

  label(at, text, { x0, x1, y0, y1 }, color) {
    const left = Math.max(x0, 0) + 6, room = Math.min(x1, this.width) - left - 2;
    const top = Math.max(y0, 0), middle = Math.min(top + Math.max(7, (Math.min(y1, this.height) - top) / 2), y1 - 5);
    if (room < 18 || at.measureText(text).width > room) return;
    at.fillStyle = color;
    at.fillText(text, left, middle);
  }

  labelSpace(at, item) {
    const { y0, y1 } = item.box, high = Math.min(y1, this.height) - Math.max(y0, 0);
    if (high < 46) return;
    at.save();
    at.translate((GUTTER - 3) / 2, Math.max(y0, 0) + high / 2);
    at.rotate(-Math.PI / 2);
    at.textAlign = "center";
    at.fillStyle = this.colors.ink;
    let text = spaceName(item.space);
    while (text.length > 4 && at.measureText(text).width > high - 8) text = `${text.slice(0, -2)}…`;
    at.fillText(text, 0, 0.5);
    at.restore();
  }

  // -- hands ------------------------------------------------------------------------------------------

  hit(x, y) {
    for (let at = this.items.length - 1; at >= 0; at--) {
      const { box } = this.items[at];
      if (box && x >= box.x0 && x < box.x1 && y >= box.y0 && y < Math.max(box.y1, box.y0 + 1)) return this.items[at];
    }
    return null;
  }

  zoom(by, x = 0.5, y = 0.5, deep = false) {
    const view = this.view, axes = deep ? [["x0", "x1", x]] : [["y0", "y1", y]];
    for (const [from, to, middle] of axes) {
      const span = view[to] - view[from], next = Math.min(1, Math.max(1 / 400, span * by)), here = view[from] + span * middle;
      view[from] = Math.min(1 - next, Math.max(0, here - next * middle));
      view[to] = view[from] + next;
    }
    this.draw();
  }

  pan(dx, dy) {
    const view = this.view;
    for (const [from, to, by] of [["x0", "x1", dx], ["y0", "y1", dy]]) {
      const span = view[to] - view[from];
      view[from] = Math.min(1 - span, Math.max(0, view[from] - by * span));
      view[to] = view[from] + span;
    }
    this.draw();
  }

  reset() {
    this.view = { x0: 0, x1: 1, y0: 0, y1: 1 };
    this.draw();
  }

  // Have what is selected be seen.
  reveal(item) {
    const { view } = this, span = view.y1 - view.y0;
    if (item.to.y0 >= view.y0 && item.to.y0 <= view.y1) return;
    view.y0 = Math.min(1 - span, Math.max(0, (item.to.y0 + item.to.y1 - span) / 2));
    view.y1 = view.y0 + span;
  }

  walk(step) {
    const here = this.selected === null ? null : this.byName.get(this.selected);
    let next = null;
    if (!here) next = this.top ? this.top.children[0] : null;
    else if (step === "in") next = here.children[0];
    else if (step === "out") next = here.parent;
    else {
      const beside = here.parent ? here.parent.children : this.top.children, by = step === "down" ? 1 : -1;
      next = beside[beside.indexOf(here) + by];
      if (!next) { // no sibling is left: to who stands there in the same depth, of another parent
        const level = this.items.filter((item) => item.depth === here.depth && item.row[ROW.pages] > 0).sort((a, b) => a.to.y0 - b.to.y0);
        next = level[level.indexOf(here) + by];
      }
    }
    if (!next) return;
    this.reveal(next);
    this.select(next.name);
  }

  listen() {
    const { canvas } = this;
    let drag = null;
    const place = (event) => {
      const box = canvas.getBoundingClientRect();
      return [event.clientX - box.left, event.clientY - box.top];
    };
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [x, y] = place(event), by = Math.exp((event.deltaY || event.deltaX) * 0.0015);
      this.zoom(by, Math.max(0, (x - GUTTER) / (this.width - GUTTER - 6)), y / this.height, event.shiftKey);
    }, { passive: false });
    canvas.addEventListener("pointerdown", (event) => {
      const [x, y] = place(event);
      drag = { x, y, moved: false };
      canvas.setPointerCapture(event.pointerId);
    });
    canvas.addEventListener("pointermove", (event) => {
      const [x, y] = place(event);
      if (drag) {
        if (drag.moved || Math.hypot(x - drag.x, y - drag.y) > 4) {
          this.pan((x - drag.x) / this.width, (y - drag.y) / this.height);
          drag = { x, y, moved: true };
        }
      } else if (event.pointerType !== "touch") {
        const item = this.hit(x, y);
        if (item !== this.hovered) { this.hovered = item; this.draw(); }
        this.on.hover(item, x, y);
      }
    });
    canvas.addEventListener("pointerup", (event) => {
      const [x, y] = place(event);
      if (drag && !drag.moved) {
        const item = this.hit(x, y);
        this.select(item ? item.name : null);
      }
      drag = null;
    });
    canvas.addEventListener("pointerleave", () => { this.hovered = null; this.on.hover(null); this.draw(); });
    canvas.addEventListener("dblclick", (event) => {
      const item = this.hit(...place(event));
      if (item) this.on.enter(item.name);
    });
    canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const does = {
        ArrowRight: () => this.walk("in"), ArrowLeft: () => this.walk("out"),
        ArrowUp: () => this.walk("up"), ArrowDown: () => this.walk("down"),
        Enter: () => this.selected !== null && this.on.enter(this.selected),
        Backspace: () => this.on.out(), Home: () => { this.reset(); this.on.enter(null); },
        "+": () => this.zoom(0.7), "=": () => this.zoom(0.7), "-": () => this.zoom(1 / 0.7), 0: () => this.reset(),
      }[event.key];
      if (does) { event.preventDefault(); event.stopPropagation(); does(); }
    });
  }
}

export function spaceName(space) {
  if (!space) return "";
  const [lora, extra, salt] = space;
  return [lora ?? (extra || salt ? null : "no lora"), extra && `key ${extra.slice(0, 6)}`, salt && `salt ${salt.slice(0, 6)}`].filter(Boolean).join(" · ");
}

export function words(item, pageSize) {
  const { row } = item;
  const lines = [];
  if (item.space) lines.push(`namespace ${spaceName(item.space)}`);
  else lines.push(`${count(row[ROW.pages] * pageSize)} tokens in ${count(row[ROW.pages])} pages, from token ${count(item.depth * pageSize)}`);
  lines.push(`branch: ${count(row[ROW.total])} pages (device ${count(row[ROW.device])}, host ${count(row[ROW.host])}), ${count(row[ROW.children])} children`);
  if (!item.space) {
    const tier = { device: "device", host: "host", both: "device and host", bare: "neither tier" }[tierOf(row[ROW.present])];
    lines.push(`${tier}${row[ROW.writing] ? ", being written" : ""}; locks: ${row[ROW.deviceLocks]} device, ${row[ROW.hostLocks]} host`);
    lines.push(`came ${seconds(row[ROW.age])} ago, last used ${seconds(row[ROW.idle])} ago`);
  }
  return lines.join("\n");
}
