"""What a stream costs: rows a second, memory and scores against rows, devices, processes and depth.

    python benchmarks/scale.py rows --rows 1e6,1e7 --steps 200        memory and speed, beside the same fit in memory
    python benchmarks/scale.py processes --rows 1e6 --batch 20000     one process beside two on loopback, a thread each
    python benchmarks/scale.py depth --data taxi --rows 1e7           test RMSE (or AUC: --data collider) by depth
    python benchmarks/scale.py predict --rows 1e7                     prediction of a directory: memory, speed, order

Tables are generated once into --work. Every fit runs in a process of its own, so that its peak memory is its own.
Results are appended to results/scale.csv as they come; what is there is not run again. The time for 1e9 rows is a
projection from the measured rate, and says so.
"""

import argparse
import json
import os
import pathlib
import resource
import socket
import subprocess
import sys
import time

COLUMNS = ("kind", "data", "rows", "steps", "batch", "depth", "processes", "devices", "precision", "source")
FIGURES = ("steps_per_second", "rows_per_second", "scan_seconds", "peak_mib", "score", "best")
TARGETS = {"taxi": "duration", "collider": "label"}


# --- one fit, in a process of its own ---------------------------------------------------------------------------------


def fit(job):
    """Fit, measure, and print one line of JSON."""
    import jax
    import numpy as np

    from fathomgp.data import ParquetSource
    from fathomgp.estimators import DeepGPClassifier, DeepGPRegressor
    from fathomgp.fitting import start_distributed

    if job["processes"] > 1:
        start_distributed(job["coordinator"], job["processes"], job["rank"])
    began, times = time.perf_counter(), []
    source = ParquetSource(job["path"], TARGETS[job["data"]], hold_out=min(0.1, 20_000 / job["rows"]))
    source.moments()
    scan = time.perf_counter() - began
    kind = DeepGPClassifier if job["data"] == "collider" else DeepGPRegressor
    model = kind(
        "dsvi",
        depth=job["depth"],
        num_inducing=job["inducing"],
        batch_size=job["batch"],
        max_iter=job["steps"],
        precision=job["precision"],
        callbacks=[lambda event: times.append((event["step"], time.perf_counter()))],
        random_state=0,
        verbose=False,
    )
    model.fit(*([source] if job["source"] == "stream" else in_memory(job)))
    if jax.process_index() == 0:
        steps, moments = np.array(times[len(times) // 4 :]).T  # without compilation
        rate = float(np.median(np.diff(steps) / np.diff(moments)))  # of chunks: other programs disturb some of them
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        figures = {"steps_per_second": rate, "rows_per_second": rate * job["batch"], "scan_seconds": scan}
        print(json.dumps(figures | {"peak_mib": peak, "devices": jax.device_count()} | score(model, source)))


def in_memory(job):
    import pandas as pd

    table = pd.read_parquet(job["path"])
    return table.drop(columns=TARGETS[job["data"]]), table[TARGETS[job["data"]]]


def score(model, source):
    """Test RMSE beside the noise, or AUC beside the truth's."""
    import numpy as np
    import pandas as pd

    from fathomgp.data import JOURNEY_NOISE, best_collider_auc
    from fathomgp.metrics import auc

    X, y = source.held_out()
    X = pd.DataFrame(X, columns=list(source.input_names))
    if hasattr(model, "classes_"):
        return {"score": float(auc(y, model.predict_proba(X))), "best": best_collider_auc()}
    return {"score": float(np.sqrt(np.mean((model.predict(X) - y) ** 2))), "best": JOURNEY_NOISE}


# --- many fits --------------------------------------------------------------------------------------------------------


def measure(arguments, **choice):
    """The figures of a job, from the file of results or from a run."""
    from fathomgp.bench import ResultFile

    job = {
        "kind": arguments.kind,
        "data": arguments.data,
        "rows": int(float(arguments.rows.split(",")[0])),
        "steps": arguments.steps,
        "batch": arguments.batch,
        "depth": 2,
        "processes": 1,
        "devices": arguments.devices,
        "precision": arguments.precision,
        "source": "stream",
    } | choice
    results = ResultFile(arguments.out, (*COLUMNS, *FIGURES), COLUMNS)
    key = {name: job[name] for name in COLUMNS}
    found = results.find(key)
    if found is None:
        found = key | run(job | {"inducing": arguments.inducing, "path": table(arguments, job)}, arguments)
        results.append({name: found[name] for name in (*COLUMNS, *FIGURES)})
    print({name: found[name] for name in ("rows", "depth", "processes", "source", *FIGURES)}, flush=True)
    return {name: float(found[name]) for name in FIGURES}


def table(arguments, job):
    from fathomgp.data import generate_table

    path = pathlib.Path(arguments.work) / f"{job['data']}-{job['rows']}"
    if not path.exists():
        generate_table(job["data"], job["rows"], path)
    return str(path)


def run(job, arguments):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        job["coordinator"] = f"localhost:{free.getsockname()[1]}"
    flags = f"--xla_force_host_platform_device_count={job['devices']}"
    if arguments.one_thread:
        flags += " --xla_cpu_multi_thread_eigen=false"
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}"}
    if arguments.one_thread:
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NPROC": "1"}
    children = []
    for rank in range(job["processes"]):
        command = [sys.executable, __file__, "--job", json.dumps(job | {"rank": rank})]
        if arguments.one_thread:
            command = ["taskset", "-c", str(rank % (os.cpu_count() or 1)), *command]
        children.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"A fit ended with the exit codes {[child.returncode for child in children]}.")
    return json.loads(said[0].strip().splitlines()[-1]) | {"devices": job["devices"]}


def rows_table(arguments):
    figures = {}
    sizes = [int(float(word)) for word in arguments.rows.split(",")]
    for rows in sizes:
        figures[rows] = measure(arguments, rows=rows)
    memory = measure(arguments, rows=sizes[0], source="memory")
    share = figures[sizes[0]]["steps_per_second"] / memory["steps_per_second"]
    print(f"\nSteps a second, streamed over in memory ({sizes[0]:,} rows): {100 * share:.0f} %.")
    rate = figures[sizes[-1]]["rows_per_second"]
    scan = sizes[-1] / figures[sizes[-1]]["scan_seconds"]
    hours = (1e9 / rate + 1e9 / scan) / 3600
    print(f"Projection, not a measurement: an epoch over 1e9 rows at this rate takes {hours:.1f} hours.")
    plot(arguments, sizes, figures)


def plot(arguments, sizes, figures):
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    labels = {"peak_mib": "peak memory, MiB", "rows_per_second": "rows a second"}
    for axis, (name, label) in zip(axes, labels.items(), strict=True):
        axis.plot(sizes, [figures[rows][name] for rows in sizes], "o-")
        axis.set(xscale="log", xlabel="rows", ylabel=label, ylim=(0, None))
    figure.savefig(pathlib.Path(arguments.out).with_suffix(".png"))


def processes_table(arguments):
    one, two = (measure(arguments, processes=processes) for processes in (1, 2))
    print(f"\nTwo processes over one: {two['steps_per_second'] / one['steps_per_second']:.2f} x the steps a second.")


def depth_table(arguments):
    for depth in (int(word) for word in arguments.depths.split(",")):
        figures = measure(arguments, depth=depth)
        print(f"depth {depth}: {figures['score']:.4f}, {figures['score'] / figures['best']:.3f} of the best reachable")


def predict_table(arguments):
    """A small model predicts a large directory through the command line."""
    import tempfile

    import pyarrow.parquet as pq

    rows = int(float(arguments.rows.split(",")[0]))
    path = table(arguments, {"data": arguments.data, "rows": rows})
    with tempfile.TemporaryDirectory(dir=arguments.work) as directory:
        fathomgp = [sys.executable, "-c", "from fathomgp.cli import main; main()"]
        small = ["--depth", "1", "--max-iter", "50", "--batch-size", "1000", "--num-inducing", "20", "--quiet"]
        words = ["fit", path, "--target", TARGETS[arguments.data], "--out", f"{directory}/model", *small]
        subprocess.run([*fathomgp, *words], check=True)
        began = time.perf_counter()
        subprocess.run([*fathomgp, "predict", f"{directory}/model", path, "-o", f"{directory}/out"], check=True)
        seconds = time.perf_counter() - began
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        same = all(
            pq.read_metadata(file).num_rows == pq.read_metadata(pathlib.Path(directory, "out", file.name)).num_rows
            for file in pathlib.Path(path).iterdir()
        )
    print(f"{rows:,} rows in {seconds:.0f} s, {rows / seconds:,.0f} a second; peak {peak:.0f} MiB")
    print(f"As many rows in every file as there were: {same}")


KINDS = {"rows": rows_table, "processes": processes_table, "depth": depth_table, "predict": predict_table}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", nargs="?", choices=KINDS, default="rows")
    parser.add_argument("--data", choices=TARGETS, default="taxi")
    parser.add_argument("--rows", default="1e6,1e7")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=10_000)
    parser.add_argument("--inducing", type=int, default=100)
    parser.add_argument("--depths", default="1,2,3,4")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--precision", default="mixed")
    parser.add_argument("--one-thread", action="store_true", help="a core for each process")
    parser.add_argument("--work", default="scale-data")
    parser.add_argument("--out", default="results/scale.csv")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        fit(json.loads(arguments.job))
    else:
        KINDS[arguments.kind](arguments)


if __name__ == "__main__":
    main()
