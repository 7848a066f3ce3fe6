"""Mirrors run directories to MLflow; the only file that imports mlflow, and only in a process of its own.

    runs/<id>/record.json, config.json             -> the campaign's run (parent)
    runs/<id>/<stage>/record.json, metrics.jsonl   -> one run per stage (child): parameters, metrics, tags, small files, status
    campaigns/<sweep>/record.json                  -> a sweep's run; its trials, campaigns too, are its children
    .../mlflow.json                                <- which MLflow run, and how far it was sent

The files are the truth and MLflow a copy that may lag: `sync` sends what is missing, whenever it is called, so an outage
costs nothing. A `Shipper` runs beside the work, calls it every three seconds from the first metric on (or after a minute) and
once more at the end, and what an unreachable server missed goes out with the next run of the same workspace. Steps once sent
are not sent again: a resumed stage cuts its file back to the checkpoint and writes the same values anew.

The flow ships for its stages and tells them so in TITHE_PARENT_TRACKS; a stage by hand or under `dvc repro` ships itself.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tasks.compare import CHARTS, Row
from tasks.locks import Owner, wait_for
from tasks.record import Record, Status, begin, config_hash, ending, finish, flatten, git_tags, read_record, truth
from tasks.sweep import read_trial
from tasks.workspace import REPOSITORY, Workspace, server_database, state_directory
from trainer.config import as_tree
from trainer.errors import DataError, TitheError, without_password
from trainer.files import canonical_json, list_files, read_json, read_manifest, sha256_text, write_json
from trainer.metrics import EVENTS, METRICS, RESULT, read_lines
from trainer.processes import importing, yield_to_work

SIDECAR = "mlflow.json"
PARENT_TRACKS = "TITHE_PARENT_TRACKS"
LOG = "stage.log"
MAX_METRICS, MAX_PARAMS, MAX_VALUE = 1000, 100, 6000  # of one log_batch; characters of one parameter
MAX_FILE_BYTES, MAX_ARTIFACT_BYTES = 32 * 1024**2, 128 * 1024**2
TRIAL_CURVES = frozenset(CHARTS)  # they lie on a trial's own run too, so that MLflow's comparison of trials shows them
_INTERVAL_SECONDS, _PAUSES_SECONDS = 3.0, (5.0, 15.0, 30.0, 60.0)
_PATIENCE_SECONDS = 60.0  # loading MLflow takes a core for two seconds, which the start of a campaign needs itself
CLOSE_SECONDS = 60.0
_SURVIVOR_SECONDS = 90.0
_NOT_NEEDED = "pandas"  # a third of MLflow's loading; it does without, as its slim package always must


class TrackingError(TitheError):
    """MLflow could not be reached or refused what it was sent; it is sent again later."""


def own_store() -> str:
    """Return the store that `tithe up` shows: the SQLite file of this repository, or a database by TITHE_DATABASE."""
    return server_database("mlflow", "psycopg") or f"sqlite:///{state_directory() / 'mlflow.db'}"


def tracking_uri() -> str:
    """Return MLFLOW_TRACKING_URI, or this repository's own store."""
    return os.environ.get("MLFLOW_TRACKING_URI") or own_store()


def artifact_root() -> Path:
    """Return where the default store keeps uploaded files."""
    return state_directory() / "mlartifacts"


# --- how far a run directory was sent -------------------------------------------------------------------------------


@dataclass
class Cursor:
    """A place in metrics.jsonl that survives the file being cut back and grown again."""

    offset: int = 0  # bytes sent
    tail: str = ""  # sha256 of the last line sent: proof that the offset is still in the same file
    tail_bytes: int = 0
    last_step: int = -1
    skip_until: int = -1  # after a cut: steps up to here were sent before


def read_new(path: Path, cursor: Cursor) -> tuple[list[dict[str, Any]], Cursor]:
    """Return the metric lines that were not sent yet, and the cursor behind them."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed below)
    except FileNotFoundError:
        return [], cursor
    with file:
        start, skip = cursor.offset, cursor.skip_until
        if start:
            file.seek(max(0, start - cursor.tail_bytes))
            if _digest(file.read(cursor.tail_bytes)) != cursor.tail:
                start, skip = 0, cursor.last_step
        file.seek(start)
        whole = file.read().rpartition(b"\n")[0]
    if not whole:
        return [], Cursor(start, cursor.tail if start else "", cursor.tail_bytes if start else 0, cursor.last_step, skip)
    raw = whole.split(b"\n")
    tail = raw[-1] + b"\n"
    lines = [line for line in map(_metric_line, raw) if line is not None and line["step"] > skip]
    last = max([cursor.last_step, *(line["step"] for line in lines)])
    return lines, Cursor(start + len(whole) + 1, _digest(tail), len(tail), last, skip)


def _metric_line(raw: bytes) -> dict[str, Any] | None:
    """Return a line of metrics.jsonl, or None for one that a crash or a hand has torn: it must not hold up the others."""
    try:
        line = json.loads(raw)
        return {"step": int(line["step"]), "time": float(line["time"]), "metrics": dict(line["metrics"])}
    except (ValueError, KeyError, TypeError):
        return None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


@dataclass
class Sidecar:
    """What MLflow has of one run directory."""

    record: str = ""  # id of the record that it mirrors
    uri: str = ""  # without a password
    experiment_id: str = ""
    run_id: str = ""
    sent: str = ""  # digest of the record that was sent last
    params_sent: bool = False
    summed_up: str = ""  # digest of the record and the final numbers that were sent last
    finals: str = ""  # digest of the final numbers alone
    tags: dict[str, str] = field(default_factory=dict)  # of the record, that were sent
    uploaded: str = ""  # digest of the end and the artifacts whose files were sent
    alarms: dict[str, str] = field(default_factory=dict)  # tags that were sent
    cursor: Cursor = field(default_factory=Cursor)
    curve: Cursor = field(default_factory=Cursor)  # of a trial: how far its train stage's curves were sent to its own run

    @classmethod
    def read(cls, directory: Path) -> Sidecar:
        try:
            tree = read_json(directory / SIDECAR)
            return cls(**{**tree, **{name: Cursor(**tree.get(name, {})) for name in ("cursor", "curve")}})
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return cls()

    def write(self, directory: Path) -> None:
        write_json(directory / SIDECAR, asdict(self))


def digest_of(record: Record, extra: Any = None) -> str:
    return sha256_text(canonical_json([asdict(record), extra]))


def is_behind(place: Path) -> bool:
    """Whether MLflow lacks something of a campaign's run directory, or of a sweep. Needs no MLflow."""
    for directory in [path for run in runs_of(place) for path in directories(run)]:
        record, sidecar = read_record(directory), Sidecar.read(directory)
        if record is None:
            continue
        if sidecar.record != record.id or sidecar.sent != digest_of(record) or record.status == "RUNNING":
            return True
        if read_new(directory / METRICS, sidecar.cursor)[0] or alarm_tags(directories(directory)) != sidecar.alarms:
            return True
    return False


def alarm_tags(places: Sequence[Path]) -> dict[str, str]:
    """Return the tags of the alarms in some run directories: `alarm.<signal>` with the last one of each, `alarms` with all."""
    lines = [line for place in places for line in read_lines(place / EVENTS) if line["kind"] == "alarm"]
    tags = {f"alarm.{line.get('signal', 'other')}": f"step {line['step'] or 0}: {line['reason']}" for line in lines}
    names = sorted(name.removeprefix("alarm.") for name in tags)
    return tags | {"alarms": ", ".join(names)} if tags else {}


def runs_of(place: Path) -> list[Path]:
    """The run directories of a sweep's trials after the sweep itself; a campaign's run directory is its own."""
    return [place, *sorted(path.parent for path in place.glob("[0-9]*/runs/*/record.json"))]


def directories(run: Path) -> list[Path]:
    """The run directory of a campaign and those of its stages, as far as they have a record."""
    return [run, *sorted(path.parent for path in run.glob("*/record.json"))]


# --- the mirror ------------------------------------------------------------------------------------------------------


def clean_key(key: str) -> str:
    """Return a metric or parameter name with only the characters that MLflow takes."""
    return re.sub(r"[^\w\-. :/]", "_", key)[:250]


def as_value(value: Any) -> str:
    """Return a parameter's value as MLflow keeps it: text, lists as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= MAX_VALUE else text[: MAX_VALUE - 1] + "…"


class Mirror:
    """A connection to one MLflow store. Importing mlflow takes seconds, so it happens here and not before.

    Raises:
        TrackingError: from every method, when MLflow cannot be reached or refuses.
    """

    def __init__(self, uri: str):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")  # the default blocks for four minutes
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
        os.environ.pop("MLFLOW_RUN_ID", None)  # it would win over every run id given here
        with importing():
            import mlflow  # noqa: F401
            from mlflow.entities import Metric, Param, RunTag
            from mlflow.exceptions import MlflowException
            from mlflow.tracking import MlflowClient
            from requests.exceptions import RequestException
            from sqlalchemy.exc import SQLAlchemyError

        self.uri, self.name = uri, without_password(uri)
        self._failures = (MlflowException, RequestException, SQLAlchemyError, OSError)
        self._metric, self._param, self._tag = Metric, Param, RunTag
        self._experiments: dict[str, str] = {}
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        # The first client makes or migrates the store.
        with self._named(), wait_for(state_directory() / "mlflow.lock"), importing():
            self._client = MlflowClient(tracking_uri=uri)
            if not uri.startswith("http"):
                self._client.search_experiments(max_results=1)

    def _named(self) -> _Named:
        return _Named(self.name, self._failures)

    def experiment(self, campaign: str) -> str:
        """Return the id of the experiment of a campaign, made if it is not there."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or campaign
        if name not in self._experiments:
            found = self._client.get_experiment_by_name(name)
            if found is None:
                ours = self.uri == own_store()
                location = (artifact_root() / name).as_uri() if ours else None
                try:
                    kind = {"mlflow.experimentKind": "custom_model_development"}  # which pages MLflow shows first
                    self._experiments[name] = self._client.create_experiment(name, artifact_location=location, tags=kind)
                except self._failures:  # somebody else made it in between, or it cannot be made
                    found = self._client.get_experiment_by_name(name)
                    if found is None:
                        raise
            if found is not None:
                self._experiments[name] = found.experiment_id
        return self._experiments[name]

    def sync(self, place: Path) -> None:
        """Make MLflow agree with a campaign's run directory, or with a sweep's."""
        for run in runs_of(place):
            self._sync(run)

    def _sync(self, run: Path) -> None:
        with its_turn(run), self._named():
            campaign = truth(run)
            if campaign is None:
                return
            stages = {path: record for path in directories(run)[1:] if (record := truth(path)) is not None}
            final = {f"final/{record.name}/{key}": value for record in stages.values() for key, value in record.final.items()}
            uploads = [record for record in stages.values() if record.artifact and record.artifact["upload"] == "campaign"]
            parent = self._mirror(run, campaign, self._parent(run, campaign), {**final, **campaign.final}, uploads)
            for path, record in stages.items():
                self._mirror(path, record, parent, {f"final/{k}": v for k, v in record.final.items()}, [record])

    def _parent(self, run: Path, trial: Record) -> str | None:
        """Return the MLflow run of the sweep that a trial belongs to."""
        place = (run / trial.parent).resolve()
        record = truth(place) if trial.parent else None
        if record is None:
            return None
        with wait_for(place / ".mlflow.lock"):
            return self._mirror(place, record, None, record.final, [])

    def _mirror(self, directory: Path, record: Record, parent: str | None, final: dict[str, float], files: list[Record]) -> str:
        sidecar = Sidecar.read(directory)
        if sidecar.record != record.id or sidecar.uri != self.name or not self._exists(sidecar, record, final):
            sidecar = Sidecar(record.id, self.name, self.experiment(record.campaign))
            sidecar.run_id = self._create(record, sidecar.experiment_id, parent)
            sidecar.write(directory)
        before = asdict(sidecar)
        if not sidecar.params_sent:
            self._params(sidecar.run_id, record)
            sidecar.params_sent = True
        sidecar.cursor = self._ship(directory / METRICS, sidecar.run_id, sidecar.cursor)
        if record.parent:
            sidecar.curve = self._ship(directory / "train" / METRICS, sidecar.run_id, sidecar.curve, TRIAL_CURVES)
        alarms = alarm_tags(directories(directory))
        if sidecar.alarms != alarms:
            self._client.log_batch(sidecar.run_id, tags=[self._tag(clean_key(k), as_value(v)) for k, v in alarms.items()])
            for name in sidecar.alarms.keys() - alarms.keys():  # of steps that a resumed stage takes again
                self._client.delete_tag(sidecar.run_id, clean_key(name))
            sidecar.alarms = alarms
        wanted = digest_of(record, final)
        if sidecar.summed_up != wanted:
            finals = sha256_text(canonical_json(final))
            if sidecar.finals != finals:
                self._finals(sidecar.run_id, record, final)
                sidecar.finals = finals
            uploads = sha256_text(canonical_json([record.status, record.ended, *(entry.artifact for entry in files)]))
            if record.status != "RUNNING" and sidecar.uploaded != uploads:
                self._upload(directory, sidecar.run_id, record, files)
                sidecar.uploaded = uploads
            sidecar.tags = self._state(sidecar.run_id, record, sidecar.tags)
            sidecar.summed_up = wanted
        sidecar.sent = digest_of(record)
        if asdict(sidecar) != before:
            sidecar.write(directory)
        return sidecar.run_id

    def _exists(self, sidecar: Sidecar, record: Record, final: dict[str, float]) -> bool:
        """Whether the run is still there; asked only when something is to be sent anyway."""
        if sidecar.summed_up == digest_of(record, final):
            return True
        try:
            return self._client.get_run(sidecar.run_id).info.lifecycle_stage == "active"
        except self._failures as error:
            if getattr(error, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def _create(self, record: Record, experiment_id: str, parent: str | None) -> str:
        tags = {"mlflow.source.name": "tithe", "mlflow.source.type": "PROJECT", "kind": record.kind}
        if parent is not None:
            tags["mlflow.parentRunId"] = parent
        created = self._client.create_run(
            experiment_id, start_time=int(record.started * 1000), tags={**tags, **record.tags}, run_name=record.name
        )
        return str(created.info.run_id)

    def _params(self, run_id: str, record: Record) -> None:
        entries = [self._param(clean_key(key), as_value(value)) for key, value in record.params.items()]
        for start in range(0, len(entries), MAX_PARAMS):
            self._client.log_batch(run_id, params=entries[start : start + MAX_PARAMS])

    def _ship(self, path: Path, run_id: str, before: Cursor, only: frozenset[str] | None = None) -> Cursor:
        """Send the new metric lines, all of them or some names, and return the cursor behind them."""
        lines, cursor = read_new(path, before)
        entries = [
            self._metric(clean_key(key), float(value), int(line["time"] * 1000), line["step"])
            for line in lines
            for key, value in line["metrics"].items()
            if only is None or key in only
        ]
        for start in range(0, len(entries), MAX_METRICS):  # sent twice it would be the same rows
            self._client.log_batch(run_id, metrics=entries[start : start + MAX_METRICS])
        return cursor

    def _finals(self, run_id: str, record: Record, final: dict[str, float]) -> None:
        moment = int((record.ended or record.started) * 1000)
        entries = [self._metric(clean_key(key), value, moment, 0) for key, value in final.items()]
        for start in range(0, len(entries), MAX_METRICS):
            self._client.log_batch(run_id, metrics=entries[start : start + MAX_METRICS])

    def _state(self, run_id: str, record: Record, before: dict[str, str]) -> dict[str, str]:
        """Send the tags that are new, and the status: a run that goes on again is opened again. Return all tags."""
        owner = Owner.from_json(record.owner)
        tags = {**record.tags, "attempt": str(record.attempt), "owner": f"{owner.host}:{owner.pid}", "error": record.error or ""}
        if record.artifact:
            tags |= {"artifact.path": record.artifact["path"], "artifact.sha256": record.artifact["content_sha256"]}
        entries = [self._tag(clean_key(key), as_value(value)) for key, value in tags.items() if before.get(key) != value]
        if entries:
            self._client.log_batch(run_id, tags=entries)
        if record.status == "RUNNING":
            self._client.update_run(run_id, status="RUNNING")
        else:
            assert record.ended is not None
            self._client.set_terminated(run_id, status=record.status, end_time=int(record.ended * 1000))
        return tags

    def register(
        self, run: Path, name: str, place: Path, tags: dict[str, str], story: str, scores: dict[str, float], champion: bool
    ) -> tuple[int, bool]:
        """Make an artifact a version of a registered model, unless the same content is one already.

        Args:
            run: run directory of the campaign, which was sent before.
            place: the artifact; its bytes stay there.
            story: where it comes from, for people.
            scores: of the evaluation, bound to the version's model.
            champion: whether the alias `champion` moves to it.

        Returns:
            The version's number, and whether it was there.
        """
        import mlflow
        from mlflow.entities import Metric

        sidecar = Sidecar.read(run)
        with self._named(), wait_for(state_directory() / "registry.lock"):
            mlflow.set_tracking_uri(self.uri)
            mlflow.set_registry_uri(self.uri)
            if not self._client.search_registered_models(f"name = '{name}'"):
                self._client.create_registered_model(name, description="Promoted by `tithe promote`; the bytes are DVC's.")
            known = self._client.search_model_versions(f"name = '{name}'")
            same = [version for version in known if version.tags.get("content_sha256") == tags["content_sha256"]]
            if same:
                number = int(same[0].version)
            else:
                model = mlflow.create_external_model(
                    name=clean_key(f"{name}-{place.name}"),
                    source_run_id=sidecar.run_id,
                    experiment_id=sidecar.experiment_id,
                    tags=tags,
                    model_type="merged" if place.name == "merged" else "adapter",
                )
                moment = int(time.time() * 1000)
                metrics = [Metric(clean_key(key), value, moment, 0, model.model_id) for key, value in scores.items()]
                self._client.log_batch(sidecar.run_id, metrics=metrics)
                with redirect_stderr(io.StringIO()):  # where it tells of itself
                    version = mlflow.register_model(f"models:/{model.model_id}", name, tags=tags)
                number = int(version.version)
                self._client.update_model_version(name, str(number), description=story)
            if same and champion:  # it may have been refused before, by another margin
                for key, value in tags.items():
                    self._client.set_model_version_tag(name, str(number), key, value)
            if champion:
                self._client.set_registered_model_alias(name, "champion", str(number))
        return number, bool(same)

    def row(self, run: Path) -> Row:
        """Return what MLflow holds of one run."""
        sidecar, stage = Sidecar.read(run), Sidecar.read(run / "train")
        if not sidecar.run_id or sidecar.uri != self.name:
            raise DataError(str(run), f"MLflow at {self.name} has nothing of it; `tithe sync` sends it")
        with self._named():
            found = self._client.get_run(sidecar.run_id)
            curved = sidecar.run_id if found.data.tags.get("trial") else stage.run_id
            names = self._client.get_run(curved).data.metrics if curved else {}
            curves = {
                name: [(float(point.step), point.value) for point in self._client.get_metric_history(curved, name)]
                for name in TRIAL_CURVES & set(names)
            }
        final = {key.removeprefix("final/"): value for key, value in found.data.metrics.items() if key.startswith("final/")}
        params = {key: value for key, value in found.data.params.items() if not key.startswith("sweep.")}
        ended = self._client.get_run(stage.run_id).info if stage.run_id else None
        seconds = (ended.end_time - ended.start_time) / 1000 if ended and ended.end_time else None
        how = ending(found.info.status, found.data.tags.get("error"))
        return Row(found.info.run_name, how, params, curves, final, seconds)

    def _upload(self, directory: Path, run_id: str, record: Record, files: list[Record]) -> None:
        for name in ("config.json", EVENTS, RESULT, LOG):
            path = directory / name
            if path.is_file() and 0 < path.stat().st_size <= MAX_FILE_BYTES:
                self._client.log_artifact(run_id, str(path))
        for source in files:
            if source.artifact is None:
                continue
            folder = Path(source.artifact["path"])
            manifest = read_manifest(folder)
            if manifest is None or manifest["content_sha256"] != source.artifact["content_sha256"]:
                continue  # replaced since by another configuration's
            wanted = source.artifact["upload"] == record.kind
            for path in [folder / "manifest.json", *(small_files(folder) if wanted else ())]:
                inside = str(Path(folder.name) / path.relative_to(folder).parent)
                self._client.log_artifact(run_id, str(path), inside)


@contextmanager
def its_turn(run: Path) -> Iterator[None]:
    """Wait until nobody else sends a run directory.

    Raises:
        TrackingError: nothing can be written there.
    """
    with ExitStack() as turn:
        try:
            turn.enter_context(wait_for(run / ".mlflow.lock"))
        except OSError as error:
            raise TrackingError(
                f"{run} cannot be written to ({error.strerror}), and what MLflow has is noted there; "
                "make it writable for this user, or sync a copy of its workspace (--workspace)"
            ) from error
        yield


class _Named:
    """Turns MLflow's many kinds of failure into a TrackingError of one line."""

    def __init__(self, name: str, failures: tuple[type[Exception], ...]):
        self.name, self.failures = name, failures

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self.failures):
            text = without_password(" ".join(str(error).split()))
            raise TrackingError(f"MLflow at {self.name}: {text[:200]}") from error


def small_files(folder: Path) -> Iterator[Path]:
    """Yield an artifact's files that are small enough to be uploaded, in order, until there are too many bytes."""
    total = 0
    for path in list_files(folder):
        size = path.stat().st_size
        if size <= MAX_FILE_BYTES and total + size <= MAX_ARTIFACT_BYTES:
            total += size
            yield path


def read_rows(runs: list[Path]) -> list[Row]:
    """Return what MLflow holds of some runs, for comparison: a trial's curves are its own, a campaign's those of its train stage.

    Raises:
        TrackingError: MLflow cannot be reached. DataError: a run was never sent to it.
    """
    mirror = Mirror(tracking_uri())
    return [mirror.row(run) for run in runs]


# --- a session: what a stage by hand, or under `dvc repro`, does for itself ----------------------------------------------


class Session:
    """The campaign's record and its shipper, for stages that no flow runs. Starts with the first stage that really runs."""

    def __init__(self, workspace: Workspace):
        self.workspace = workspace
        self._shipper: Shipper | None = None

    def start(self) -> None:
        """Write that the campaign is worked on, and begin to ship."""
        if self._shipper is None:
            begin_campaign(self.workspace)
            self._shipper = Shipper(self.workspace.root, self.workspace.run)

    def end(self, status: Status, error: str | None = None) -> None:
        """Write how the work ended and wait until MLflow has it, or cannot have it now."""
        if self._shipper is not None:
            finish(self.workspace.run, status, error=error)
            self._shipper.close()


def begin_campaign(workspace: Workspace) -> Record:
    """Write in the run directory that a campaign runs."""
    workspace.claim_run()
    config = workspace.config
    names = {"campaign": config.campaign.name, "run": workspace.run_id, "workspace": str(workspace.root)}
    tags, params, name, parent = {**names, **git_tags(REPOSITORY)}, flatten(as_tree(config)), workspace.run_id, ""
    trial = read_trial(workspace.root)
    if trial is not None:
        name, parent = trial["name"], os.path.relpath(workspace.root.parent, workspace.run)
        tags |= {"sweep": trial["sweep"], "trial": str(trial["number"])}
        params |= {f"sweep.{key}": value for key, value in trial["values"].items()}
    return begin(workspace.run, "campaign", name, config, config_hash(config), params, tags, parent)


# --- the shipper, a process beside the work --------------------------------------------------------------------------


class Shipper:
    """Keeps MLflow in step with a run directory from a process of its own, until `close`.

    The process notices by itself when its owner dies, and then still sends what there is.
    """

    def __init__(self, root: Path, run: Path):
        self.run = run
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tasks.tracking", "follow", str(root), str(run)],
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def hurry(self) -> None:
        """Have what there is sent now, so that little is left for `close`."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(b"\n")
            self._process.stdin.flush()

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until everything was sent, or cannot be now; return whether it was. A slow one is left to finish by itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            return self._process.wait(timeout_seconds) == 0
        except subprocess.TimeoutExpired:
            say(f"MLflow at {without_password(tracking_uri())} is slow; process {self._process.pid} goes on sending {self.run}")
            return False


def say(text: str) -> None:
    print(f"tithe: {text}", file=sys.stderr, flush=True)


def follow(root: Path, run: Path) -> int:
    """Sync a run until standard input ends, then once more; at last send what earlier runs of the workspace still owe."""
    yield_to_work()
    mirror: Mirror | None = None
    failures, due = 0, 0.0
    patience = time.monotonic() + _PATIENCE_SECONDS
    word: bytes | None = None  # from the owner: a line means now, the end of the stream means that it is over
    while word is None and time.monotonic() < patience and not any(run.glob(f"*/{METRICS}")):
        word = listen(0.5)
    while True:
        ended = word == b""
        if ended:
            wait_for_survivors(run)
        if word is not None or time.monotonic() >= due:
            try:
                mirror = mirror or Mirror(tracking_uri())
                mirror.sync(run)
                if failures:
                    say(f"MLflow at {mirror.name} is back; everything was sent")
                failures, due = 0, time.monotonic() + _INTERVAL_SECONDS
            except TrackingError as error:
                if not failures:
                    say(f"{error}. The campaign goes on; its metrics stay in {run} and are sent as soon as MLflow answers")
                due = time.monotonic() + _PAUSES_SECONDS[min(failures, len(_PAUSES_SECONDS) - 1)]
                failures += 1
        if ended:
            return 1 if failures else catch_up(mirror, root, run)
        word = listen(max(0.0, min(_INTERVAL_SECONDS, due - time.monotonic())))


def listen(timeout_seconds: float) -> bytes | None:
    """Return what comes on standard input, nothing at its end, None when the time is over."""
    return os.read(0, 4096) if select.select([0], [], [], timeout_seconds)[0] else None


def catch_up(mirror: Mirror | None, root: Path, run: Path) -> int:
    """Send what other, finished runs of the workspace still owe; return 0 when nothing is left."""
    assert mirror is not None
    for other in sorted(path.parent for path in (root / "runs").glob("*/record.json")):
        record = read_record(other)
        abandoned = record is not None and not Owner.from_json(record.owner).is_alive
        if other != run and abandoned and is_behind(other):
            try:
                mirror.sync(other)
                say(f"sent {other.name} to MLflow, which had missed it")
            except TrackingError as error:
                say(str(error))
                return 1
    return 0


def wait_for_survivors(run: Path) -> None:
    """After an owner's sudden death its stage still writes a checkpoint; wait for that, within reason."""
    deadline = time.monotonic() + _SURVIVOR_SECONDS
    while time.monotonic() < deadline:
        records = [read_record(path) for one in runs_of(run) for path in directories(one)[1:]]
        if not any(r and r.status == "RUNNING" and Owner.from_json(r.owner).is_alive for r in records):
            return
        time.sleep(0.5)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks.tracking", description="Send run directories to MLflow.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("initialise", help="make the default store, once")
    for name, help_text in (("sync", "send what MLflow lacks of a run"), ("follow", "sync until standard input ends")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("root", type=Path, help="workspace")
        command.add_argument("run", type=Path, help="run directory")
    options = parser.parse_args(arguments)
    if options.command == "follow":
        return follow(options.root, options.run)
    try:
        mirror = Mirror(tracking_uri())
        if options.command == "sync":
            mirror.sync(options.run)
            return catch_up(mirror, options.root, options.run)
    except TrackingError as error:
        say(str(error))
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.modules.setdefault(_NOT_NEEDED, None)  # type: ignore[arg-type]
    sys.exit(main(sys.argv[1:]))
