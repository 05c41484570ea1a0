// Every timed block of a case, in the order in which it ran: drift and outliers are to be seen, not averaged away.
function rounds(root) {
  const { kernels, cases } = DATA[root.dataset.rounds];
  const choice = make("select", null, { "aria-label": "Case" });
  cases.forEach((one, i) => choice.append(make("option", one.label, { value: i })));
  const tools = make("div", null, { class: "tools" });
  tools.append(make("label", "Case "), choice);
  const place = make("div");
  root.append(tools, place);
  const names = { "(aa)": "the baseline, built again", "(anchor)": "machine anchor (numpy)", "(gemm)": "bare matrix products" };
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let plot = null;

  function draw() {
    if (plot) plot.destroy();
    const one = cases[Number(choice.value)], most = Math.max(...one.seconds);
    const [unit, size] = [["s", 1], ["ms", 1e-3], ["µs", 1e-6]].find(([, s]) => most >= s) || ["ns", 1e-9];
    const used = kernels.map((_, k) => k).filter((k) => one.kernel.includes(k));
    const columns = used.map((k) => one.kernel.map((kernel, i) => (kernel === k ? one.seconds[i] / size : null)));
    const axis = { stroke: colour("--fg"), grid: { stroke: colour("--line") }, ticks: { stroke: colour("--line") } };
    plot = new uPlot({
      width: Math.max(280, Math.min(760, root.clientWidth)), height: 320,
      scales: { x: { time: false }, y: { distr: 3 } },
      axes: [
        { ...axis, label: "block, in the order of the run" },
        { ...axis, label: `${unit} per call`, size: 80, values: (_, ticks) => ticks.map((v) => (v === null ? "" : String(Number(v.toPrecision(3))))) },
      ],
      series: [{ label: "block" }, ...used.map((k) => ({
        label: names[kernels[k]] || kernels[k], stroke: colour("--c" + (k % 8)), paths: () => null, points: { show: true, size: 5 },
      }))],
    }, [one.seconds.map((_, i) => i), ...columns], place);
  }

  choice.addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  addEventListener("resize", draw);
  draw();
}
document.querySelectorAll("[data-rounds]").forEach(rounds);
