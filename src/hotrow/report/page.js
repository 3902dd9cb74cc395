// Draws the page's plots in the colours of the screen, and, in a live page, asks for what is new.
"use strict";
(() => {
  const LIGHT = {
    colours: ["#0b62a4", "#c1440e", "#1a7f4b", "#8250a8", "#7a5c00", "#007c89", "#b0297a", "#57606a"],
    text: "#1b1f24", grid: "#d0d7de", back: "#ffffff",
  };
  const DARK = {
    colours: ["#6cb6ff", "#ff9e64", "#5dd39e", "#c9a0ff", "#e5c453", "#4dd0e1", "#ff8ac4", "#9da7b3"],
    text: "#e6edf3", grid: "#36404b", back: "#0f1419",
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const fine = matchMedia("(pointer: fine)");
  const page = JSON.parse(document.getElementById("page-data").textContent);

  const watch = new ResizeObserver((changes) => {
    for (const { target } of changes) {
      if (Math.abs(target.clientWidth - target._fullLayout.width) > 1) Plotly.Plots.resize(target);
    }
  });

  const coloured = (trace, theme) => {
    const { colour, ...rest } = trace;
    if (colour === undefined) return rest;
    const is = theme.colours[colour % theme.colours.length];
    return { ...rest, line: { ...rest.line, color: is }, marker: { ...rest.marker, color: is } };
  };

  const axis = (own, theme) => ({
    automargin: true, gridcolor: theme.grid, linecolor: theme.grid, zerolinecolor: theme.grid, ...own,
  });

  const draw = (plot) => {
    const theme = dark.matches ? DARK : LIGHT;
    const place = document.getElementById(plot.id);
    const { xaxis, yaxis, ...rest } = plot.layout;
    const layout = {
      font: { color: theme.text, family: "system-ui, sans-serif", size: 13 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      hoverlabel: { bgcolor: theme.back, bordercolor: theme.grid, font: { color: theme.text }, namelength: -1 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal" },
      margin: { l: 8, r: 16, t: 24, b: 8 },
      dragmode: fine.matches ? "zoom" : false,  // on a touch screen a drag scrolls the page
      ...rest,
      xaxis: axis(xaxis, theme), yaxis: axis(yaxis, theme),
      shapes: (rest.shapes || []).map((shape) => coloured(shape, theme)),
    };
    const traces = plot.traces.map((trace) => coloured(trace, theme));
    return Plotly.react(place, traces, layout, { displayModeBar: false })
      .then(() => watch.observe(place));
  };

  const drawAll = () => Promise.all(page.plots.map(draw)).then(() => {
    document.documentElement.dataset.drawn = String(page.plots.length);
  });
  dark.addEventListener("change", drawAll);
  drawAll();

  if (!page.live) return;
  const button = document.getElementById("pause");
  const now = document.getElementById("now");
  const told = document.getElementById("told");
  let paused = false;
  button.addEventListener("click", () => {
    paused = !paused;
    button.textContent = paused ? "Go on updating" : "Stop updating";
  });

  const take = (fresh) => {
    if (fresh.shape !== page.shape) { location.reload(); return; }
    page.version = fresh.version;
    page.plots = fresh.plots;
    drawAll();
    for (const [id, html] of Object.entries(fresh.parts)) document.getElementById(id).innerHTML = html;
    now.textContent = fresh.now;
    if (told.textContent !== fresh.told) told.textContent = fresh.told;
  };

  const ask = async () => {
    try {
      const answer = await fetch(`data.json?version=${page.version}`, { cache: "no-store" });
      if (answer.status === 200) take(await answer.json());
      if (answer.status >= 400) throw new Error(String(answer.status));
    } catch {
      now.textContent = "hotrow report --live does not answer any more; what is shown is the last it said.";
    }
  };
  setInterval(() => { if (!paused && !document.hidden) ask(); }, page.live * 1000);
})();
