"""The roofline plot of a result file: percent of roof by workload, ours beside the rivals."""

from __future__ import annotations

from pathlib import Path

from result_files import Run


def roofline(data: Run, target: Path) -> None:
    """Every row of a run as a point: arithmetic intensity against GFLOP/s."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    roofs, rows = data["machine"]["roofs"], data["rows"]
    figure, axes = plt.subplots(figsize=(9, 5.5))
    intensity = [2.0**e for e in range(-2, 12)]
    for label, peak in (
        ("bf16", "bf16_gflops"),
        ("fp32", "fp32_gflops"),
        ("int8", "int8_gops"),
        ("fp32 AVX2", "fp32_avx2_gflops"),
    ):
        if peak in roofs:
            line = [min(roofs[peak], i * roofs["dram_gbps"]) for i in intensity]
            axes.plot(intensity, line, linewidth=1, label=f"roof {label}")
    for impl in sorted({r["impl"] for r in rows}):
        mine = [r for r in rows if r["impl"] == impl and r["gbps"] > 0]
        axes.scatter(
            [r["gflops"] / r["gbps"] for r in mine],
            [r["gflops"] for r in mine],
            s=28 if impl == "ours" else 18,
            marker="o" if impl == "ours" else "x",
            label=impl,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of weights read")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(f"{data['machine']['cpu']}, {data['machine']['threads']} threads")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    plt.close(figure)
