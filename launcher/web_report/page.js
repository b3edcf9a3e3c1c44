"use strict";
// Values under the pointer, and series that a click on the legend hides. The page says all it has to say without this.
(() => {
  const read = text => { const [low, high, unit, log] = text.split(" "); return { low: +low, high: +high, unit, log: log === "1" }; };
  const value = (axis, part) => axis.log
    ? axis.low * Math.pow(axis.high / axis.low, part) : axis.low + (axis.high - axis.low) * part;
  const scaled = (v, base, units) => {
    let at = 0;
    while (Math.abs(v) >= base && at < units.length - 1) { v /= base; at += 1; }
    return v.toPrecision(3).replace(/\.?0+$/, "") + units[at];
  };
  const text = (axis, v) => {
    switch (axis.unit) {
      case "bytes": return v.toFixed(0) === "0" ? "0 B" : bytes(v);
      case "count": return Math.abs(v) < 1e5 ? String(Math.round(v * 10) / 10) : scaled(v, 1000, ["", "K", "M", "B", "T"]);
      case "share": return (100 * v).toFixed(1) + "%";
      case "seconds": return seconds(v);
      default: return Number(v.toPrecision(4)).toString();
    }
  };
  const bytes = v => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let at = 0;
    while (Math.abs(v) >= 1024 && at < 5) { v /= 1024; at += 1; }
    return v.toFixed(at ? 1 : 0) + " " + units[at];
  };
  const seconds = v => {
    if (v < 1) return (v * 1000).toPrecision(3) + " ms";
    if (v < 60) return v.toFixed(1) + "s";
    const h = Math.floor(v / 3600), m = Math.floor(v % 3600 / 60), s = Math.round(v % 60);
    return (h ? h + "h " : "") + m + "m " + s + "s";
  };
  const points = path => {
    if (!path.points) {
      // What makes a dot of a single point (h0) is no point.
      const numbers = path.getAttribute("d").replaceAll("h0", "").match(/-?[\d.]+/g).map(Number);
      const all = [];
      for (let at = 0; at + 1 < numbers.length; at += 2) all.push([numbers[at], numbers[at + 1]]);
      path.points = all;
    }
    return path.points;
  };
  const nearest = (list, x) => list.reduce((best, each) => Math.abs(each[0] - x) < Math.abs(best[0] - x) ? each : best);
  for (const box of document.querySelectorAll(".area-box[data-y]")) {
    const x = read(box.dataset.x), y = read(box.dataset.y);
    const cross = document.createElement("div"), told = document.createElement("div");
    cross.className = "cross hidden"; told.className = "read hidden";
    box.append(cross, told);
    const leave = () => { cross.classList.add("hidden"); told.classList.add("hidden"); };
    box.addEventListener("pointerleave", leave);
    box.addEventListener("pointermove", event => {
      const frame = box.getBoundingClientRect();
      const part = Math.min(1, Math.max(0, (event.clientX - frame.left) / frame.width));
      const lines = [];
      for (const path of box.querySelectorAll("path[data-series]")) {
        if (path.classList.contains("hidden")) continue;
        const list = points(path);
        let shown;
        if (path.classList.contains("area")) {
          const half = list.length / 2, at = list.indexOf(nearest(list.slice(0, half), 1000 * part));
          const height = (list[list.length - 1 - at][1] - list[at][1]) / 1000;
          shown = (y.high - y.low) * height;
        } else {
          const near = nearest(list, 1000 * part);
          if (Math.abs(near[0] - 1000 * part) > 60) continue;
          shown = value(y, 1 - near[1] / 1000);
        }
        lines.push(path.dataset.series + "  " + text(y, shown));
      }
      if (!lines.length) { leave(); return; }
      if (box.querySelector(".area")) lines.reverse();
      told.textContent = text(x, value(x, part)) + "\n" + lines.join("\n");
      cross.style.left = 100 * part + "%";
      told.style.left = part < .5 ? "calc(" + 100 * part + "% + 8px)" : "auto";
      told.style.right = part < .5 ? "auto" : "calc(" + (100 - 100 * part) + "% + 8px)";
      cross.classList.remove("hidden"); told.classList.remove("hidden");
    });
  }
  for (const row of document.querySelectorAll("[data-toggles]")) {
    row.style.cursor = "pointer";
    row.addEventListener("click", () => {
      const off = row.classList.toggle("off");
      for (const path of row.closest(".plot").querySelectorAll("path[data-series]")) {
        if (path.dataset.series === row.dataset.toggles) path.classList.toggle("hidden", off);
      }
    });
  }
})();
