// The page: asks the daemon every second while it is seen, and shows what it says. Nothing is kept but the last minutes.

import { Tree, count, seconds, words } from "/web/tree.js";
import { Chart, Ring, short } from "/web/charts.js";
import * as panels from "/web/panels.js";

const EVERY_MS = 1000, SOON_MS = 70, WAIT_MS = 5000;
const $ = (id) => document.getElementById(id);
const state = {
  rank: 0, ranks: [], root: null, path: [], live: null, picture: null, epoch: null, node: null, start: 0,
  paused: false, away: null, tries: 0, theme: localStorage.getItem("sglcache.theme") || "auto", info: null,
  names: new Set(), // that /api knows
};
const ring = new Ring();
const charts = { pools: new Map(), hits: null, stored: null };

class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

async function ask(path, body) {
  const options = { signal: AbortSignal.timeout(WAIT_MS), headers: { Accept: "application/json" } };
  if (body) Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  let answer, told = null;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Refused(0, "The daemon does not answer"); // it is away, or slower than we wait
  }
  try { told = await answer.json(); } catch { /* what is no JSON is no answer of ours */ }
  if (!answer.ok && !(path === "/health" && told)) throw new Refused(answer.status, told?.error?.message || `${answer.status} ${answer.statusText}`);
  return told;
}

const api = (name, params = {}) => ask(`/api/${name}?${new URLSearchParams({ rank: state.rank, ...params })}`);
const say = (text) => { $("said").textContent = text; };

// -- themes ---------------------------------------------------------------------------------------------

let colors = {};
function theme(name) {
  if (!(name in colors)) colors[name] = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return colors[name];
}

function applyTheme() {
  const dark = state.theme === "dark" || (state.theme === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
  $("theme").textContent = `Theme: ${state.theme}`;
  colors = {};
  tree.theme();
  legend();
  drawCharts();
}

function nextTheme() {
  state.theme = { auto: "dark", dark: "light", light: "auto" }[state.theme];
  localStorage.setItem("sglcache.theme", state.theme);
  applyTheme();
  say(`Theme: ${state.theme}`);
}

// -- the tree -------------------------------------------------------------------------------------------

const tree = new Tree($("tree"), {
  select: (item) => selected(item),
  enter: (name) => enter(name),
  out: () => out(),
  hover: (item, x, y) => hover(item, x, y),
});

function legend() {
  const entries = [
    ["device", "device"], ["host", "host alone"], ["both", "device and host"], ["writing", "being written to the host"],
    ["locked", "locked: in use, pinned or copied"], ["old", "paler: longer not used"], ["rest", "more than is drawn"],
  ];
  panels.put($("legend"), ...entries.map(([kind, text]) => panels.make("li", { "data-kind": kind }, panels.make("canvas", { width: 44, height: 24, "aria-hidden": "true" }), text)));
  for (const li of $("legend").children) swatch(li.dataset.kind, li.firstChild);
}

function swatch(kind, canvas) {
  const at = canvas.getContext("2d");
  at.clearRect(0, 0, 44, 24);
  at.setTransform(2, 0, 0, 2, 0, 0);
  const fill = (color) => { at.fillStyle = color; at.fillRect(0, 0, 22, 12); };
  if (kind === "rest") fill(tree.hatch("rest"));
  else if (kind === "old") [1, 0.75, 0.5, 0.38].forEach((alpha, i) => { at.globalAlpha = alpha; at.fillStyle = tree.colors.both; at.fillRect(i * 5.5, 0, 5.5, 12); });
  else {
    fill(tree.colors[kind === "locked" || kind === "writing" ? "device" : kind]);
    if (kind === "host" || kind === "both") fill(tree.hatch(kind));
    if (kind === "locked") { at.fillStyle = tree.colors.locked; at.fillRect(0, 0, 4, 12); }
    if (kind === "writing") { at.strokeStyle = tree.colors.host; at.setLineDash([4, 3]); at.lineWidth = 2; at.strokeRect(1, 1, 20, 10); }
  }
  at.setTransform(1, 0, 0, 1, 0, 0);
}

function hover(item, x, y) {
  const tip = $("tip");
  tip.hidden = !item;
  if (!item) return;
  tip.textContent = words(item, tree.pageSize);
  const wide = tip.offsetWidth, high = tip.offsetHeight;
  tip.style.left = `${Math.max(2, Math.min(tree.width - wide - 6, x + 14))}px`;
  tip.style.top = `${y + high + 22 > tree.height ? Math.max(2, y - high - 8) : y + 16}px`;
}

function selected(item) {
  state.start = 0;
  state.node = null;
  $("unselect").hidden = !item;
  $("detail").hidden = !item;
  $("largest").hidden = !!item;
  $("detail-title").textContent = item ? "Node" : "Largest prefixes";
  if (item) {
    say(words(item, tree.pageSize));
    askNode();
  } else {
    showLargest();
  }
}

function showLargest() {
  if (!$("largest").hidden) panels.largest($("largest"), tree, tree.pageSize, (name) => tree.select(name));
}

async function askNode(start = state.start) {
  const name = tree.selected, { rank } = state;
  if (name === null) return;
  try {
    const node = await api("node", { name, start });
    if (tree.selected !== name || state.rank !== rank) return;
    if (node.epoch !== state.epoch) return;
    state.node = node;
    state.start = start;
    showNode();
  } catch (error) {
    if (!(error instanceof Refused)) throw error; // a bug of this page
    if (tree.selected === name && error.status) panels.put($("detail"), panels.make("p", { class: "note" }, error.message));
  }
}

function showNode() {
  if (!state.node || tree.selected === null) return;
  panels.detail($("detail"), state.node, tree.byName.get(tree.selected), tree.pageSize, {
    more: (start) => askNode(start), enter, select: (name) => tree.byName.has(name) ? tree.select(name) : enter(name),
  });
}

function enter(name) {
  if (name === state.root) return;
  const above = []; // so that Backspace need not wait for the next picture
  for (let item = tree.byName.get(name)?.parent; item; item = item.parent) above.unshift([item.name, item.row[2]]);
  if (above.length) state.path = [...state.path, ...above];
  state.root = name;
  tree.reset();
  if (name === null) say("The whole tree");
  else say("This branch alone");
  askTree();
}

function out() {
  if (state.root === null) return tree.reset();
  const above = state.path.at(-1);
  const was = state.root;
  state.path = state.path.slice(0, -1);
  enter(above === undefined ? null : above[0]);
  tree.select(was);
}

let treeAsked = 0;
async function askTree() {
  const asked = ++treeAsked, { rank, root } = state;
  const params = { budget: tree.budget };
  if (root !== null) params.root = root;
  try {
    const picture = await api("tree", params);
    if (asked !== treeAsked || rank !== state.rank) return;
    if (picture.pending) { setTimeout(() => asked === treeAsked && askTree(), SOON_MS); return; }
    if (newLife(picture.epoch)) return;
    if (picture.gone !== undefined) {
      say("What was shown is gone; this is the whole tree");
      state.root = null;
      tree.select(null);
      askTree();
      return;
    }
    state.picture = picture;
    state.path = picture.path;
    tree.tiers = state.live ? new Set(state.live.pools.map((pool) => pool.tier)).size : 2;
    tree.show(picture, state.live ? state.live.page_size : 1);
    showPicture();
  } catch (error) {
    failed(error);
  }
}

function showPicture() {
  const { picture } = state, drawn = picture.rows.length - picture.spaces.length;
  $("empty").hidden = picture.pages[0] > 0;
  $("drawn").textContent = `${count(picture.pages[0])} pages: ${count(drawn)} of ${count(Math.max(drawn, picture.num_nodes))} nodes drawn`;
  const text = `The radix tree: ${count(picture.pages[0])} pages, ${count(picture.pages[1])} on the device, ${count(picture.pages[2])} on the host, in ${count(picture.num_nodes)} nodes of ${count(picture.num_spaces)} namespaces`;
  if ($("tree").getAttribute("aria-label") !== text) $("tree").setAttribute("aria-label", text);
  const crumbs = [panels.make("button", { type: "button", "data-key": "top", "aria-current": state.root === null ? "true" : null, onclick: () => enter(null) }, "all")];
  for (const [name, pages] of state.path.slice(-5)) {
    crumbs.push(panels.make("i", {}, "›"), panels.make("button", { type: "button", "data-key": `c${name}`, onclick: () => enter(name) }, pages ? `${count(pages * tree.pageSize)} tokens` : "namespace"));
  }
  if (state.root !== null) crumbs.push(panels.make("i", {}, "›"), panels.make("button", { type: "button", "aria-current": "true" }, `branch from token ${count(picture.before * tree.pageSize)}`));
  panels.put($("crumbs"), ...crumbs);
  showLargest();
  if (tree.selected !== null) showNode();
}

// -- numbers --------------------------------------------------------------------------------------------

const HIT = [
  { name: "device", color: "device" }, { name: "host", color: "host" }, { name: "below", color: "third" }, { name: "not cached", color: "rest" },
];
const hitValues = ({ counters }) => {
  const third = counters.l3_matched_tokens || 0, host = counters.host_matched_tokens - third;
  return [counters.matched_tokens - counters.host_matched_tokens, host, third, counters.request_tokens - counters.matched_tokens];
};

function drawCharts() {
  const { live } = state;
  if (!live) return;
  for (const [i, pool] of live.pools.entries()) {
    const key = `${pool.resource}/${pool.tier}`;
    if (pool.total === 0) continue;
    if (!charts.pools.has(key)) {
      const title = `${live.pools.some((each) => each.resource !== pool.resource) ? `${pool.resource} ` : ""}${pool.tier.toLowerCase()}`;
      charts.pools.set(key, new Chart($("pools"), title, [
        { name: "locked", color: "locked" }, { name: "cached", color: "cached" }, { name: "leased", color: "leased" },
        { name: "fenced", color: "fenced" }, { name: "free", color: "free" },
      ], { stacked: true, unit: "pages" }));
    }
    const points = ring.gauges((sample) => {
      const now = sample.pools[i];
      return now ? [now.locked, now.cached - now.locked, now.leased, now.fenced, now.free] : [0, 0, 0, 0, 0];
    });
    charts.pools.get(key).draw(points, theme, pool.total);
  }
  charts.hits ??= new Chart($("hits"), "asked for", HIT, { stacked: true, tall: true, unit: "tokens a second" });
  const hits = ring.rates(hitValues);
  charts.hits.draw(hits, theme);
  const recent = hits.slice(-60).filter((point) => point.values).reduce((sum, point) => sum.map((value, i) => value + point.values[i]), [0, 0, 0, 0]);
  const whole = recent.reduce((one, other) => one + other, 0);
  charts.rate ??= charts.hits.caption.appendChild(panels.make("b", { id: "hit-rate" }));
  charts.rate.textContent = whole ? `${((100 * (whole - recent[3])) / whole).toFixed(1)} % hit (1 min)` : "";
  if (live.stream || live.counters.blocks_stored) {
    charts.stored ??= new Chart($("stream"), "blocks", [{ name: "stored", color: "both" }, { name: "removed", color: "leased", dash: [4, 3] }], { tall: true, unit: "blocks a second" });
    charts.stored.draw(ring.rates(({ counters }) => [counters.blocks_stored, counters.blocks_removed]), theme);
  }
}

function showLive() {
  const { live } = state;
  const device = live.pools.find((pool) => pool.tier === "DEVICE");
  const used = device ? `${((100 * device.cached) / device.total).toFixed(0)} % cached` : null;
  panels.facts($("facts"), [
    ["device", used], ["requests", short(live.counters.requests)], ["leases", count(live.gauges.leases)], ["waiting", count(live.gauges.waiting)],
    ["nodes", count(live.gauges.nodes)], ["refused", short(live.counters.refused)],
  ]);
  const { stream } = live;
  panels.facts($("stream-facts"), stream ? [
    ["subscribers", count(stream.subscriptions)], ["number", count(stream.next_seq - 1)], ["replays", short(stream.replay_requests)],
    ["readers", count(stream.readers)], ["skipped", short(stream.batches_skipped)], ["ring", `${short(stream.ring_batches)} batches`],
  ] : [["events", "off"]]);
  $("sessions-count").textContent = `${count(live.gauges.sessions)} attached or ended with pages, ${count(live.gauges.leases)} leases`;
  panels.sessions($("sessions"), live.sessions);
  panels.tenants($("tenants"), live.tenants);
  const rates = {};
  const [one, other] = ring.samples.slice(-2);
  if (other && !other.fresh) for (const [i, lane] of live.copies.entries()) if (one.values.lanes[i] !== undefined) rates[lane.name] = (other.values.lanes[i] - one.values.lanes[i]) / (other.at - one.at);
  panels.copies($("copies"), live, rates);
  drawCharts();
}

function newLife(epoch) {
  if (state.epoch === epoch) return false;
  const known = state.epoch !== null;
  state.epoch = epoch;
  state.root = null;
  state.picture = null;
  state.path = [];
  tree.clear();
  tree.select(null);
  if (known) { say("The rank began a new life"); askTree(); }
  return known;
}

async function askLive() {
  const { rank } = state;
  try {
    const live = await api("live");
    if (rank !== state.rank) return;
    here();
    newLife(live.epoch);
    state.live = live;
    ring.add(live.at, { pools: live.pools, counters: live.counters, lanes: live.copies.map((lane) => lane.pages) }, live.epoch);
    showLive();
  } catch (error) {
    failed(error);
  }
}

async function askHealth() {
  try {
    const health = await ask("/health");
    state.ranks = health.ranks;
    showHealth(health);
  } catch (error) {
    failed(error);
  }
}

function showHealth(health) {
  const pill = $("state"), mine = health.ranks.find((each) => each.rank === state.rank);
  if (!state.away) {
    const what = health.status === "ok" || health.ranks.length === 1 ? health.status : mine?.state === "ok" && !mine.troubles ? "ok" : health.status;
    pill.dataset.state = what;
    pill.textContent = `${what}${health.uptime_s ? `, up ${seconds(health.uptime_s)}` : ""}`;
  }
  const tabs = $("ranks");
  tabs.hidden = health.ranks.length < 2;
  panels.put(tabs, ...health.ranks.map((each) => panels.make("button", {
    type: "button", role: "tab", "data-key": `r${each.rank}`, "aria-selected": each.rank === state.rank ? "true" : "false",
    "data-bad": each.state !== "ok" || each.troubles ? true : null, title: `dp ${each.dp_rank}, pp ${each.pp_rank}: ${each.state}`, onclick: () => chooseRank(each.rank),
  }, `rank ${each.rank}`)));
  const troubles = health.reason ? health.reason.split("; ") : [];
  $("troubles").hidden = !troubles.length;
  panels.put($("troubles"), ...troubles.map((text) => panels.make("li", {}, text)));
}

function chooseRank(rank) {
  if (rank === state.rank) return;
  Object.assign(state, { rank, root: null, path: [], live: null, picture: null, epoch: null });
  ring.samples = [];
  tree.clear();
  tree.select(null);
  for (const chart of charts.pools.values()) chart.box.remove();
  charts.pools.clear();
  say(`Rank ${rank}`);
  askHealth();
  askLive().then(askTree);
}

// -- away, and back --------------------------------------------------------------------------------------

function failed(error) {
  if (!(error instanceof Refused)) throw error; // a bug of this page
  if (error.status === 404) return;
  state.away ??= Date.now();
  const where = error.message;
  const since = Math.round((Date.now() - state.away) / 1000);
  $("away").hidden = false;
  $("away").textContent = `${where} (${since} s). The page asks again every second; what it shows is from before.`;
  $("state").dataset.state = "away";
  $("state").textContent = "away";
  document.body.dataset.away = "true";
}

function here() {
  if (!state.away) return;
  state.away = null;
  $("away").hidden = true;
  delete document.body.dataset.away;
  say("The daemon is back");
  askInfo();
  askHealth();
}

async function askInfo() {
  try {
    state.names = new Set((await ask("/api")).names);
    $("s-explain").hidden = !state.names.has("explain");
    state.info = await ask("/server_info");
    askReuse();
    $("model").textContent = state.info.model_name;
    document.title = `${state.info.model_name} · sglcache`;
  } catch (error) {
    failed(error);
  }
}

// -- why, and would more help ------------------------------------------------------------------------------

async function askReuse() {
  if (!state.names.has("reuse")) return;
  try {
    panels.reuse($("reuse"), await api("reuse"));
    $("s-reuse").hidden = false;
  } catch (error) {
    $("s-reuse").hidden = true; // it is off, or the rank is away, which is told elsewhere
  }
}

async function jump(text) {
  const tokens = text.split(/[^0-9]+/).filter(Boolean).map(Number);
  if (!tokens.length) { say("Type token ids: 17, 4, 2040"); return; }
  if (state.names.has("explain")) {
    ask("/api/explain", { rank: state.rank, tokens }).then(
      (told) => panels.explained($("explain"), told), (error) => panels.explained($("explain"), { error: error.message }));
  }
  try {
    const found = await ask("/api/find", { rank: state.rank, tokens });
    say(found.name === null ? "None of these tokens are cached" : `${count(found.matched_tokens)} of ${count(tokens.length)} tokens are cached`);
    $("drawn").textContent = $("said").textContent;
    if (found.name !== null) { pick(found.name); }
  } catch (error) {
    say(error.message);
    $("drawn").textContent = error.message;
  }
}

function pick(name) {
  if (tree.byName.has(name)) {
    tree.reveal(tree.byName.get(name));
    tree.select(name);
    return;
  }
  enter(name);
  tree.selected = name;
  selected({ row: [name, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], depth: 0, space: null });
}

// -- keys --------------------------------------------------------------------------------------------------

const SECTIONS = { 1: "tree", 2: "detail", 3: "pools", 4: "hits", 5: "stream", 6: "copies", 7: "sessions", 8: "tenants", 9: "explain" };

function section(id) {
  const place = id === "detail" && $("detail").hidden ? $("largest") : $(id);
  if (!place || place.closest("section").hidden) return;
  place.focus();
  place.closest("section").scrollIntoView({ block: "nearest" });
}

function pause(on = !state.paused) {
  state.paused = on;
  $("pause").setAttribute("aria-pressed", String(on));
  $("pause").textContent = on ? "Paused" : "Pause";
  say(on ? "Paused" : "Live again");
  if (!on) turn();
}

function scale() {
  tree.sqrt = !tree.sqrt;
  $("scale").setAttribute("aria-pressed", String(tree.sqrt));
  $("scale").textContent = tree.sqrt ? "√ depth" : "linear depth";
  if (state.picture) tree.show(state.picture, tree.pageSize);
}

function step(by) {
  const at = state.ranks.findIndex((each) => each.rank === state.rank), next = state.ranks[at + by];
  if (next) chooseRank(next.rank);
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = event.target.matches("input");
  if (event.key === "Escape") {
    if (typing) $("tree").focus();
    else if (!$("help").open) tree.select(null);
    return;
  }
  if (typing || $("help").open) return;
  const does = {
    "?": () => $("help").showModal(), "/": () => $("tokens").focus(), t: nextTheme, p: () => pause(), s: scale,
    "[": () => step(-1), "]": () => step(1),
  }[event.key] || (SECTIONS[event.key] && (() => section(SECTIONS[event.key])));
  if (does) { event.preventDefault(); does(); }
});
$("theme").addEventListener("click", nextTheme);
$("pause").addEventListener("click", () => pause());
$("scale").addEventListener("click", scale);
$("keys").addEventListener("click", () => $("help").showModal());
$("unselect").addEventListener("click", () => tree.select(null));
$("jump").addEventListener("submit", (event) => { event.preventDefault(); jump($("tokens").value); $("tree").focus(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", applyTheme);
addEventListener("resize", drawCharts);

// -- the turn ----------------------------------------------------------------------------------------------

let turning = null, turns = 0;
async function turn() {
  clearTimeout(turning);
  if (document.hidden || state.paused) return;
  turns += 1;
  if (turns % 2 === 1) askHealth();
  if (turns % 10 === 1) askReuse();
  await askLive();
  if (!state.away) {
    askTree();
    if (tree.selected !== null && turns % 3 === 0) askNode();
  }
  clearTimeout(turning);
  turning = setTimeout(turn, EVERY_MS);
}
document.addEventListener("visibilitychange", () => { if (!document.hidden) turn(); });

applyTheme();
askInfo();
turn();
globalThis.sglcache = { state, tree, ring }; // for whoever debugs it, and for its tests
