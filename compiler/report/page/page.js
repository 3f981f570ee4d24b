"use strict";
const three = value => value === 0 ? "0" : value >= 1000 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(3)));
const escaped = text => text.replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", "\"": "&quot;"})[c]);

// Okabe and Ito's colours, which people with any kind of colour vision tell apart.
const KINDS = {
  "forward": "#56b4e9", "backward": "#0072b2", "optimizer": "#009e73", "to the device": "#e69f00",
  "from the device": "#d55e00", "SSD": "#f0e442", "messages": "#cc79a7", "other": "#999999",
};

let facts, spans, lineText, spansOf, chosen = -1;
const drawn = {};  // element -> chart
const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

async function decoded() {
  const packed = Uint8Array.from(atob(at("facts").textContent), c => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function chart(id, option) {
  if (drawn[id]) drawn[id].dispose();
  drawn[id] = charts.init(at(id), null, {renderer: "canvas"});
  drawn[id].setOption({
    animation: false, textStyle: {color: colour("--ink"), fontFamily: "system-ui, sans-serif"}, aria: {enabled: true},
    ...option,
  });
  return drawn[id];
}
const axis = more => ({
  axisLine: {lineStyle: {color: colour("--line")}}, axisTick: {show: false}, axisLabel: {color: colour("--faint")},
  splitLine: {lineStyle: {color: colour("--line")}}, ...more,
});
const tip = more => ({
  backgroundColor: colour("--raised"), borderColor: colour("--line"), textStyle: {color: colour("--ink"), fontSize: 12},
  confine: true, extraCssText: "max-width: 46rem; white-space: normal", ...more,
});

function table(id, heads, rows) {
  const found = at(id);
  found.replaceChildren();
  const top = make("tr");
  heads.forEach(head => { const th = make("th", head); th.scope = "col"; top.append(th); });
  found.append(top);
  rows.forEach(row => { const tr = make("tr"); row.forEach(cell => tr.append(make("td", cell))); found.append(tr); });
}

// --- verdict, stages

function verdict() {
  const v = facts.verdict, rate = v.tokens ? v.tokens / v.step_s : null;
  const gain = v.bound_s ? 1 - v.bound_s / v.from_rest_s : 0;
  at("sentence").textContent = `It fits. A step takes ${seconds(v.step_s)}` +
    (rate ? `, ${three(rate)} tokens a second` : "") + `; bound by ${v.bottleneck}.` +
    (v.bound_s ? ` No plan for this machine is faster than ${seconds(v.bound_s)} (${v.bound_by}): at most ${percent(Math.max(0, gain))} could be gained.` : "");
  const rows = [
    ["predicted step", seconds(v.step_s)], ["measured step", known(v.measured_s) ? seconds(v.measured_s) : "none yet"],
    ["tokens a second", rate ? three(rate) : ""], ["stages", v.stages], ["micro-batches", v.micro_batches],
    ["precision", v.precision], ["strategy", v.strategy], ["plan", v.plan],
    ["cost", known(v.price_per_hour) ? `${v.price_per_hour} $ an hour` + (rate ? `, ${three(v.price_per_hour / 3600 / rate * 1e6)} $ a million tokens` : "") : ""],
    ...v.wear.map(w => [`${w.memory} written a day`, bytes(w.written_bytes / w.step_s * 86400) + (known(w.days) ? `, lasts ${three(w.days)} days` : "")]),
  ];
  at("figures").replaceChildren(...rows.filter(row => row[1] !== "").map(([name, value]) => {
    const group = make("div");
    group.append(make("dt", name), make("dd", String(value)));
    return group;
  }));
  at("peaks").replaceChildren(...v.peaks.map(p => {
    const row = make("div", undefined, "peak"), bar = make("div", undefined, "bar"), inner = make("span");
    inner.style.width = Math.min(100, 100 * p.peak / p.budget) + "%";
    bar.append(inner);
    row.append(make("span", p.name), bar, make("span", `peak ${bytes(p.peak)} of ${bytes(p.budget)} (${percent(p.peak / p.budget)})`, "faint"));
    return row;
  }));
}

function stages() {
  table("stage-table", ["stage", "device", "layers", "weights", "optimizer states", "activations"],
    facts.stages.map(s => [s.name, s.device, s.title, s.weights, s.states || "none", s.activations]));
}

// --- machine

function machine() {
  const m = facts.machine, depth = {ssd: 0, ssdbus: 1, dram: 2, rc: 3, device: 4, nvlink: 5, network: 3, nic: 3};
  at("machine-note").textContent = m.more_hosts > 0 ? `The first host; ${m.more_hosts} more are like it.` : "";
  const columns = {};
  m.nodes.forEach(node => (columns[depth[node.kind] ?? 3] ||= []).push(node));
  const used = Object.keys(columns).map(Number).sort((a, b) => a - b);
  const most = Math.max(...used.map(column => columns[column].length));
  const nodes = m.nodes.map(node => {
    const column = depth[node.kind] ?? 3, peers = columns[column], share = known(node.peak) && node.budget ? node.peak / node.budget : null;
    const label = known(share) ? `${node.name}\n${bytes(node.peak)} of ${bytes(node.budget)}` : node.name;
    return {
      name: node.name, x: used.indexOf(column) * 260, y: (peers.indexOf(node) + 0.5) * (most / peers.length) * 90,
      symbol: "roundRect", symbolSize: known(share) ? [150, 46] : [90, 28],
      itemStyle: {color: colour("--raised"), borderColor: node.kind === "device" ? "#0072b2" : known(share) ? "#009e73" : colour("--faint"), borderWidth: known(share) ? 2 + 3 * share : 1},
      label: {show: true, formatter: label, color: colour("--ink"), fontSize: 11, lineHeight: 16},
    };
  });
  const edges = m.links.map(link => ({
    source: link.from, target: link.to, value: link.busy, link,
    lineStyle: {width: 1 + 8 * link.busy, color: link.busy > 0.5 ? "#d55e00" : link.busy > 0.1 ? "#e69f00" : colour("--faint"), curveness: 0.12, opacity: link.bytes ? 0.9 : 0.35},
    label: {show: link.busy > 0.05 && m.links.length < 40, formatter: percent(link.busy), color: colour("--ink"), fontSize: 10},
  }));
  at("machine-chart").style.height = Math.max(200, Math.min(760, 70 * most + 90)) + "px";
  chart("machine-chart", {
    tooltip: tip({formatter: item => item.dataType === "edge"
      ? `<b>${escaped(item.data.link.name)}</b><br>${bytes(item.data.link.bytes)} a step, busy ${percent(item.data.link.busy)} of it<br>${bytes(item.data.link.bandwidth)}/s`
      : escaped(item.name)}),
    series: [{type: "graph", layout: "none", roam: false, data: nodes, edges, edgeSymbol: ["none", "arrow"], edgeSymbolSize: 6, left: 90, right: 90, top: 40, bottom: 40}],
  });
  table("links", ["link", "from", "to", "busy", "bytes a step", "bandwidth"],
    m.links.map(l => [l.name, l.from, l.to, percent(l.busy), bytes(l.bytes), bytes(l.bandwidth) + "/s"]));
}

// --- timeline and program

function gather() {
  lineText = [];
  facts.roles.forEach(role => role.lines.forEach((line, i) => { lineText[role.first + i] = line; }));
  spans = [];
  const add = (packed, isMeasured) => packed && packed.line.forEach((line, i) => {
    const stream = packed.stream[i], [op, kind] = facts.ops[line];
    spans.push({stream, start: packed.start[i], end: packed.start[i] + packed.length[i], line, op, kind, measured: isMeasured, device: facts.streams[stream][0]});
  });
  add(facts.predicted, false);
  add(facts.measured, true);
  spans.sort((a, b) => a.measured - b.measured || a.stream - b.stream || a.start - b.start);
  spans.forEach((span, i) => { span.index = i; });
  spansOf = new Map();
  spans.forEach(span => { if (!spansOf.has(span.line)) spansOf.set(span.line, []); spansOf.get(span.line).push(span); });
}

const name = span => `${facts.device_names[span.device]} ${facts.streams[span.stream][1]}`;
const wholeEnd = () => Math.max(...spans.map(span => span.end), 1);
const zoomOf = part => { const z = part.getOption().dataZoom[0]; return [z.start, z.end]; };

function describe(span) {
  return `<b>${escaped(name(span))}</b> ${span.measured ? "measured" : "predicted"}<br>` +
    `from ${seconds(span.start * facts.unit_s)}, ${seconds((span.end - span.start) * facts.unit_s)} long<br>` +
    `<code>${escaped(lineText[span.line].trim())}</code>`;
}

function producersOf(span) {
  const found = [];
  (facts.producers[span.line] || []).forEach(line => {
    const lane = facts.device_lane[span.device];
    (spansOf.get(line) || []).forEach(other => {
      if (other.measured === span.measured && (other.device === span.device || facts.device_lane[other.device] === lane)) found.push(other);
    });
  });
  return found;
}

function arrows(list) {
  const found = [];
  list.forEach(span => producersOf(span).forEach(other => found.push([other.end, span.start, other.stream, span.stream, other.measured ? 1 : 0])));
  return found;
}

function consumersOf(span) {
  const found = [];
  for (const [line, before] of Object.entries(facts.producers)) {
    if (before.includes(span.line)) (spansOf.get(Number(line)) || []).forEach(other => {
      if (other.measured === span.measured && producersOf(other).includes(span)) found.push(other);
    });
  }
  return found;
}

function band(api, row, isMeasured) {
  const height = api.size([0, 1])[1] * 0.8, middle = api.coord([0, row])[1];
  if (!facts.measured) return [middle - height / 2, height];
  return isMeasured ? [middle, height / 2 - 1] : [middle - height / 2, height / 2 - 1];
}

function timeline() {
  const rows = facts.streams.map(([device, stream]) => `${facts.device_names[device]} ${stream}`);
  const part = {};
  at("timeline-chart").style.height = Math.max(260, Math.min(900, 34 * rows.length + 110)) + "px";
  at("code").style.height = at("timeline-chart").style.height;
  at("timeline-note").textContent = facts.measured ? "In each row predicted above measured." : "Predicted; a measured step will stand below it.";
  const used = new Set(spans.map(span => span.kind));
  at("legend").replaceChildren(...Object.keys(KINDS).filter(kind => used.has(kind)).map(kind => {
    const entry = make("span"), box = make("i");
    box.style.background = KINDS[kind];
    entry.append(box, kind);
    return entry;
  }));
  let lastRow = -1, lastPixel = -1;
  const ink = colour("--ink"), strong = colour("--strong");
  const drawn = chart("timeline-chart", {
    grid: {left: 110, right: 16, top: 8, bottom: 64},
    tooltip: tip({trigger: "item", formatter: item => item.seriesIndex === 0 ? describe(spans[item.value[3]]) : ""}),
    xAxis: axis({type: "value", min: 0, max: wholeEnd(), axisLabel: {color: colour("--faint"), formatter: value => seconds(value * facts.unit_s), hideOverlap: true}}),
    yAxis: axis({type: "category", inverse: true, data: rows, splitLine: {show: true, lineStyle: {color: colour("--line")}}}),
    dataZoom: [
      {type: "inside", filterMode: "weakFilter", zoomOnMouseWheel: true, moveOnMouseMove: true, minSpan: 0.001},
      {type: "slider", filterMode: "weakFilter", height: 18, bottom: 8, brushSelect: false, showDetail: false, textStyle: {color: colour("--faint")}},
    ],
    series: [
      {
        type: "custom", encode: {x: [0, 1], y: 2}, clip: true,
        data: spans.map(span => [span.start, span.end, span.stream, span.index]),
        renderItem: (params, api) => {
          const span = spans[api.value(3)], x = api.coord([span.start, 0])[0], end = api.coord([span.end, 0])[0];
          const row = span.stream + (span.measured ? 1e6 : 0);
          if (params.dataIndexInside === 0 || row !== lastRow) { lastRow = row; lastPixel = -1e9; }
          if (end - lastPixel < 0.5 && span.index !== chosen) return null;  // it would cover no pixel that is not drawn
          lastPixel = end;
          const [y, height] = band(api, span.stream, span.measured), width = Math.max(end - x, 0.7);
          const rect = {
            type: "rect", shape: {x, y, width, height},
            style: {fill: KINDS[span.kind], opacity: span.measured ? 0.75 : 1, stroke: span.index === chosen ? ink : undefined, lineWidth: span.index === chosen ? 3 : 0},
            emphasis: {style: {stroke: ink, lineWidth: 2}},
          };
          if (width < 46 || height < 9) return rect;
          return {type: "group", children: [rect, {
            type: "text", silent: true,
            style: {text: span.op, x: Math.max(x, params.coordSys.x) + 4, y: y + height / 2, verticalAlign: "middle", fill: span.kind === "backward" ? "#fff" : "#000", fontSize: Math.min(11, height), width: width - 8, overflow: "truncate"},
          }]};
        },
      },
      {
        type: "custom", id: "arrows", silent: true, clip: true, encode: {x: [0, 1]}, data: [], z: 5,
        renderItem: (params, api) => {
          const [from, to, row, other, measured] = [0, 1, 2, 3, 4].map(i => api.value(i));
          const middle = stream => { const [y, height] = band(api, stream, measured); return y + height / 2; };
          const x1 = api.coord([from, 0])[0], x2 = api.coord([to, 0])[0], y1 = middle(row), y2 = middle(other), bend = Math.max(14, Math.abs(x2 - x1) / 3);
          return {type: "group", children: [
            {type: "bezierCurve", shape: {x1, y1, x2, y2, cpx1: x1 + bend, cpy1: y1, cpx2: x2 - bend, cpy2: y2}, style: {stroke: strong, fill: "none", lineWidth: 1.4, opacity: 0.8}},
            {type: "polygon", shape: {points: [[x2, y2], [x2 - 7, y2 - 3.5], [x2 - 7, y2 + 3.5]]}, style: {fill: strong}},
          ]};
        },
      },
    ],
  });
  drawn.on("click", event => { if (event.seriesIndex === 0) choose(event.value[3], true); });
  drawn.on("mouseover", event => { if (event.seriesIndex === 0) light(spans[event.value[3]], true); });
  drawn.on("datazoom", () => {
    const [start, end] = zoomOf(drawn);
    if (window.memoryChart) window.memoryChart.dispatchAction({type: "dataZoom", start, end});
    showArrows();
  });
  if (chosen >= 0) showArrows();
}

const FEW = 60;  // spans in view, of which all arrows are shown

function showArrows() {
  const part = drawn["timeline-chart"], [start, end] = zoomOf(part).map(share => share / 100 * wholeEnd());
  const seen = [];
  for (const span of spans) {
    if (span.end >= start && span.start <= end) seen.push(span);
    if (seen.length > FEW) break;
  }
  const own = chosen < 0 ? [] : [spans[chosen]];
  const list = seen.length <= FEW ? seen : [...own, ...own.flatMap(consumersOf)];
  const found = seen.length <= FEW ? arrows(list) : [...arrows(own), ...own.flatMap(consumersOf).map(other => [own[0].end, other.start, own[0].stream, other.stream, other.measured ? 1 : 0])];
  part.setOption({series: [{}, {id: "arrows", data: found}]});
}

function zoom(factor, shift) {
  const part = drawn["timeline-chart"], [start, end] = zoomOf(part), middle = (start + end) / 2 + shift * (end - start);
  const half = Math.min(50, Math.max(0.0005, (end - start) / 2 * factor));
  const first = Math.min(Math.max(0, middle - half), 100 - 2 * half);
  part.dispatchAction({type: "dataZoom", dataZoomIndex: 0, start: first, end: first + 2 * half});
}

function choose(index, follow) {
  chosen = index;
  const span = spans[index];
  light(span, true);
  at("chosen").textContent = `${name(span)}, ${span.measured ? "measured" : "predicted"}: ${lineText[span.line].trim()} — from ${seconds(span.start * facts.unit_s)}, ${seconds((span.end - span.start) * facts.unit_s)}`;
  if (follow) {
    const [start, end] = zoomOf(drawn["timeline-chart"]), whole = wholeEnd(), middle = 50 * (span.start + span.end) / whole;
    if (middle < start || middle > end) zoom(1, (middle - (start + end) / 2) / (end - start));
  }
  drawn["timeline-chart"].setOption({series: [{data: spans.map(each => [each.start, each.end, each.stream, each.index])}]});
  showArrows();
}

function showProgram(device) {
  const role = facts.roles[facts.device_role[device]];
  at("device").value = String(device);
  if (at("code").dataset.role === String(facts.device_role[device])) { at("code").dataset.device = device; return; }
  at("code").dataset.role = facts.device_role[device];
  at("code").dataset.device = device;
  at("code").replaceChildren(...role.lines.map((text, i) => {
    const line = make("span", text || " ", spansOf.has(role.first + i) ? "op" : "note");
    line.dataset.line = role.first + i;
    return line;
  }));
}

function light(span, scroll) {
  showProgram(span.device);
  at("code").querySelectorAll(".lit").forEach(line => line.classList.remove("lit"));
  const line = at("code").querySelector(`[data-line="${span.line}"]`);
  if (!line) return;
  line.classList.add("lit");
  if (scroll) at("code").scrollTop = line.offsetTop - at("code").offsetTop - at("code").clientHeight / 2;
}

function chooseLine(line) {
  const own = (spansOf.get(line) || []).filter(span => span.device === Number(at("code").dataset.device));
  if (own.length) choose(own[0].index, true);
}

function neighbour(step) {
  if (chosen < 0) return choose(0, true);
  const span = spans[chosen], next = spans[chosen + step];
  choose(next && next.measured === span.measured ? chosen + step : chosen, true);
}

function stepLine(step) {
  const lines = [...at("code").querySelectorAll(".op")], now = lines.findIndex(line => line.classList.contains("lit"));
  const next = lines[Math.min(lines.length - 1, Math.max(0, now + step))];
  if (next) chooseLine(Number(next.dataset.line));
}

// --- memory

function memory() {
  const m = facts.memory[Number(at("which").value) || 0];
  if (!m) return;
  const end = wholeEnd(), points = [...m.points, [end, (m.points.at(-1) || [0, 0])[1]]];
  const at_ = time => {
    const held = m.values.filter(([, , from, to]) => from <= time && time <= to).sort((a, b) => b[1] - a[1]);
    const lasting = Object.entries(m.lasting).filter(([, num]) => num).map(([what, num]) => [what + " (lasting)", num]);
    const rows = [...lasting, ...held.slice(0, 12).map(([text, num]) => [text, num])];
    const more = held.length > 12 ? `<br>and ${held.length - 12} more` : "";
    return rows.map(([text, num]) => `${escaped(text)}: ${bytes(num)}`).join("<br>") + more;
  };
  const part = chart("memory-chart", {
    grid: {left: 110, right: 16, top: 24, bottom: 40},
    tooltip: tip({trigger: "axis", axisPointer: {type: "line"}, formatter: items => `<b>${escaped(m.name)}</b> at ${seconds(items[0].value[0] * facts.unit_s)}: ${bytes(items[0].value[1])}<br>${at_(items[0].value[0])}`}),
    xAxis: axis({type: "value", min: 0, max: end, axisLabel: {color: colour("--faint"), formatter: value => seconds(value * facts.unit_s), hideOverlap: true}}),
    yAxis: axis({type: "value", max: value => Math.max(value.max, m.budget && m.budget < 3 * value.max ? m.budget : 0) * 1.05, axisLabel: {color: colour("--faint"), formatter: bytes}}),
    dataZoom: [{type: "inside", filterMode: "none"}],
    series: [{
      type: "line", step: "end", symbol: "none", data: points, lineStyle: {color: "#0072b2", width: 1.5}, areaStyle: {color: "#56b4e9", opacity: 0.35},
      markLine: m.budget ? {silent: true, symbol: "none", data: [{yAxis: m.budget}], lineStyle: {color: "#d55e00", type: "dashed", width: 2}, label: {formatter: `budget ${bytes(m.budget)}`, color: colour("--ink"), position: "insideEndTop"}} : undefined,
    }],
  });
  window.memoryChart = part;
  const [start, stop] = zoomOf(drawn["timeline-chart"]);
  part.dispatchAction({type: "dataZoom", start, end: stop});
}

// --- bars

const SPENT = {"computation": ["#0072b2", "none"], "optimizer": ["#009e73", "circle"], "exposed transfers": ["#e69f00", "rect"], "bubble": ["#999999", "triangle"]};

function spent() {
  const rows = facts.spent, v = facts.verdict;
  at("spent-chart").style.height = Math.max(180, 26 * rows.length + 110) + "px";
  const line = (value, text) => ({xAxis: value, label: {formatter: text, color: colour("--ink"), position: "start"}});
  chart("spent-chart", {
    grid: {left: 110, right: 40, top: 56, bottom: 28}, legend: {top: 0, textStyle: {color: colour("--ink")}},
    aria: {enabled: true, decal: {show: true}},
    tooltip: tip({trigger: "axis", axisPointer: {type: "shadow"}, valueFormatter: seconds}),
    xAxis: axis({type: "value", axisLabel: {color: colour("--faint"), formatter: seconds, hideOverlap: true}}),
    yAxis: axis({type: "category", inverse: true, data: rows.map(row => row.device)}),
    series: Object.entries(SPENT).map(([kind, [fill]], i) => ({
      name: kind, type: "bar", stack: "step", data: rows.map(row => row[kind]), itemStyle: {color: fill}, barMaxWidth: 22,
      markLine: i || !v.bound_s ? undefined : {symbol: "none", precision: 15, silent: true, lineStyle: {color: "#d55e00", type: "dashed", width: 2}, data: [line(v.bound_s, `bound ${seconds(v.bound_s)}`)]},
    })),
  });
  table("spent-table", ["device", ...Object.keys(SPENT)], rows.map(row => [row.device, ...Object.keys(SPENT).map(kind => seconds(row[kind]))]));
}

function bars(id, rows, best) {
  at(id).style.height = Math.max(120, 24 * rows.length + 60) + "px";
  chart(id, {
    grid: {left: 440, right: 90, top: 8, bottom: 28},
    tooltip: tip({trigger: "axis", axisPointer: {type: "shadow"}, formatter: items => `<b>${escaped(rows[items[0].dataIndex].name)}</b><br>${escaped(rows[items[0].dataIndex].reason || seconds(rows[items[0].dataIndex].step_s))}`}),
    xAxis: axis({type: "value", axisLabel: {color: colour("--faint"), formatter: seconds, hideOverlap: true}}),
    yAxis: axis({type: "category", inverse: true, data: rows.map(row => row.name), axisLabel: {color: colour("--ink"), width: 420, overflow: "truncate", fontSize: 11}}),
    series: [{
      type: "bar", barMaxWidth: 16, data: rows.map(row => ({value: row.step_s, itemStyle: {color: row.name === best ? "#009e73" : "#56b4e9"}})),
      label: {show: true, position: "right", formatter: item => seconds(item.value), color: colour("--ink"), fontSize: 11},
    }],
  });
}

function rivals() {
  const own = {name: "this plan", step_s: facts.verdict.step_s, reason: ""};
  const timed = facts.rivals.filter(row => known(row.step_s)).slice(0, 14);
  bars("rivals-chart", [own, ...timed], own.name);
  table("rivals-table", ["plan", "step", "why it lost"], facts.rivals.map(row => [row.name, seconds(row.step_s), row.reason]));
}

function whatIf() {
  const own = {name: `this machine (${facts.verdict.hardware})`, step_s: facts.verdict.step_s, reason: ""};
  const rows = facts.helps.filter(row => known(row.step_s)).map(row => ({name: row.change, step_s: row.step_s, reason: row.reason}));
  const others = facts.machines.filter(row => known(row.step_s)).map(row => ({name: row.machine, step_s: row.step_s, reason: ""}));
  at("whatif-note").textContent = rows.length || others.length ? "The same model, planned anew for a machine with more of one thing, or for other machines." : "Nothing else was planned.";
  bars("whatif-chart", [own, ...rows, ...others].sort((a, b) => a.step_s - b.step_s), own.name);
  const money = row => known(row.price_dollars_per_hour) ? `${row.price_dollars_per_hour} $ an hour` : known(row.price_dollars) ? `${three(row.price_dollars)} $` : "not known";
  const per = row => known(row.tokens_per_dollar_of_rent) ? three(row.tokens_per_dollar_of_rent) + " tokens a dollar" : known(row.tokens_per_s_per_1000_dollars) ? three(row.tokens_per_s_per_1000_dollars) + " tokens/s for 1000 $" : "";
  if (facts.machines.length) table("machines-table", ["machine", "step", "tokens a second", "price", "for the money", ""],
    facts.machines.map(row => [row.machine, seconds(row.step_s), known(row.tokens_per_s) ? three(row.tokens_per_s) : "", money(row), per(row), row.reason || ""]));
}

// --- all of it

function draw() {
  machine(); timeline(); memory(); spent(); rivals(); whatIf();
}

function setTheme(isDark) {
  document.documentElement.dataset.theme = isDark ? "dark" : "light";
  at("theme").textContent = isDark ? "Light" : "Dark";
  at("theme").setAttribute("aria-pressed", String(isDark));
}

async function begin() {
  facts = await decoded();
  gather();
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches);
  verdict(); stages();
  facts.device_names.forEach((text, i) => { const option = make("option", text); option.value = i; at("device").append(option); });
  facts.memory.forEach((m, i) => { const option = make("option", m.name); option.value = i; at("which").append(option); });
  showProgram(0);
  draw();
  at("theme").onclick = () => { setTheme(document.documentElement.dataset.theme !== "dark"); draw(); };
  at("device").onchange = event => showProgram(Number(event.target.value));
  at("which").onchange = memory;
  at("in").onclick = () => zoom(0.5, 0);
  at("out").onclick = () => zoom(2, 0);
  at("whole").onclick = () => zoom(1e9, 0);
  const keys = {"+": () => zoom(0.5, 0), "=": () => zoom(0.5, 0), "-": () => zoom(2, 0), "0": () => zoom(1e9, 0), "ArrowLeft": () => zoom(1, -0.25), "ArrowRight": () => zoom(1, 0.25), "n": () => neighbour(1), "p": () => neighbour(-1)};
  at("timeline-chart").addEventListener("keydown", event => { if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); } });
  at("code").addEventListener("keydown", event => {
    const step = {ArrowDown: 1, ArrowUp: -1}[event.key];
    if (step) { event.preventDefault(); stepLine(step); }
  });
  at("code").addEventListener("click", event => { const line = event.target.closest(".op"); if (line) chooseLine(Number(line.dataset.line)); });
  at("code").addEventListener("mouseover", event => {
    const line = event.target.closest(".op"), part = drawn["timeline-chart"];
    part.dispatchAction({type: "hideTip"});
    part.dispatchAction({type: "downplay", seriesIndex: 0});
    const own = line && (spansOf.get(Number(line.dataset.line)) || []).filter(span => span.device === Number(at("code").dataset.device));
    if (!own || !own.length) return;
    part.dispatchAction({type: "highlight", seriesIndex: 0, dataIndex: own.map(span => span.index)});
    part.dispatchAction({type: "showTip", seriesIndex: 0, dataIndex: own[0].index});
  });
  addEventListener("resize", () => Object.values(drawn).forEach(part => part.resize()));
  document.documentElement.dataset.ready = "yes";
}
begin();
