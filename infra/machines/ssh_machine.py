"""A machine that is reached over SSH."""

import base64
import logging
import secrets
import shlex
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from infra.connection.remote import Remote
from infra.errors import LeaseLapsed, MachineError, Unreachable
from infra.host import gpu_leases
from infra.host.jobs import CANCEL_DEADLINE, START_DEADLINE
from infra.host.trees import tree_name
from infra.inventory import Slurm
from infra.machines.machine import Job, JobStatus, Offsets, Watched, literal
from infra.machines.requirements import passed_variables, wanted_gpus
from infra.machines.submission import Component, for_arrays, submission
from infra.machines.waiting import until_free
from infra.transfer.inputs import input_trees, placed
from infra.transfer.library import library_tree
from infra.transfer.sync import fetch_tree, send_tree
from rollouts_core.config import MachineConfig
from rollouts_core.errors import BadInput, StoreError
from rollouts_core.stages.stage import Stage
from rollouts_core.store.elsewhere import forget_elsewhere, note_elsewhere
from rollouts_core.store.fingerprint import COMMIT_VARIABLE, git_commit
from rollouts_core.store.local import ARRIVING, LocalStore, settle
from rollouts_core.store.manifest import FILES, ArtifactId, FileEntry, Manifest, decode_manifest, encode_manifest
from rollouts_core.store.store import Store

BEAT_SECONDS = 10.0
MARGIN = 10.0
CHECKSUM_SECONDS = 330.0
ARRAY_SECONDS = 90.0
WATCH_SECONDS = 10.0
"""A host that takes longer to say how a job is counts as away."""

logger = logging.getLogger("rollouts.machines")


class SSHMachine:
    """Jobs on a host, with the host's own store of artifacts beside them.

    With a remote store, jobs there use that store, and nothing is sent between here and there.
    """

    def __init__(
        self, remote: Remote, store: Store, settings: MachineConfig, who: str, token: str = "", node: int = 0
    ) -> None:
        """`remote` is open. `who` names the run to those who wait for its GPUs. `release` ends what is begun by it.

        `node`: of the Slurm allocation that `token` holds; 0 makes it.
        """
        self.name = f"{remote.name}+{node}" if node else remote.name
        self.remote = remote
        self.python = ""
        """Known once the environment is there."""
        self._store, self._settings, self._who = store, settings, who
        self.token, self.node, self._components = token or secrets.token_hex(8), node, [Component(1)]
        """For a Slurm allocation: the number of this node, and the components that are asked for."""
        self.address, self._host_key = remote.host.for_machines, ""
        """The address and host key by which other machines reach it."""
        self._lease: str | None = None
        self._gpus: tuple[int, ...] = ()
        self._joined = False
        self.kept: dict[str, Any] | None = None
        """The description of servers of an earlier run, if their lease was joined."""
        self._manifests: dict[ArtifactId, Manifest] = {}
        self.code = ""
        self._end = threading.Event()
        self._heart = threading.Thread(target=self._beat_until_end, name=f"lease on {self.name}", daemon=True)

    @property
    def places(self) -> Mapping[str, str | None]:
        return {"home": f"{self.remote.work}/store", "url": self._store.url}

    @property
    def gpus(self) -> tuple[int, ...]:
        return self._gpus

    @property
    def is_leased(self) -> bool:
        return self._lease is not None

    def further_nodes(self, count: int, gpus: int | None = None, options: Sequence[str] = ()) -> list["SSHMachine"]:
        """Ask for so many more nodes of the Slurm allocation, before it is claimed. They are given back with this
        machine.

        With other `gpus` or `options` of sbatch than the first ones, they are a component of their own.
        """
        first = sum(component.nodes for component in self._components)
        if gpus is None and not options and len(self._components) == 1:
            self._components = [Component(first + count)]
        else:
            self._components.append(Component(count, gpus, tuple(options)))
        return [
            SSHMachine(self.remote, self._store, self._settings, self._who, self.token, node)
            for node in range(first, first + count)
        ]

    def host_key(self) -> str:
        """Kind and key of its SSH server, as known-hosts files have them. Raises `MachineError` where it has none."""
        if not self.node:
            return self.remote.host_key()
        if not self._host_key:
            raise MachineError(f"{self.name}: no SSH server answers on {self.address}, by which nodes reach each other")
        return self._host_key

    def claim(self, jobs: Sequence[str]) -> Iterator[str]:
        yield from until_free(partial(self.try_claim, jobs), self._settings.wait_hours)
        if self._joined:
            yield f"a job of this run is running on {self.name}: its lease is joined"

    def try_claim(self, jobs: Sequence[str], label: str = "") -> str:
        """Lease what the run needs; returns why that can't be now, nothing when it is leased.

        `label`: of servers that would do, where an earlier run has left some.
        """
        self._beat()
        there = self.remote.host.gpus
        wanted = wanted_gpus(self._settings, there)
        ask = {"token": self.token, "who": self._who, "gpus": wanted, "among": list(range(there)), "jobs": list(jobs)}
        if slurm := self.remote.host.slurm:
            ask |= {"node": self.node, "slurm": submission(self.remote, slurm, self._settings, self._components)}
        answer = self.remote.call("acquire", ask={**ask, "label": label})
        if "refused" in answer:
            raise BadInput(f"{self.name}: Slurm refuses the job: {answer['refused']}")
        if "failed" in answer:
            raise MachineError(f"{self.name}: {answer['failed']}")
        if "waiting" in answer:
            return f"waiting for {self.name}: {answer['waiting']}"
        if "drained" in answer:
            return f"waiting for {self.name}: it is drained by {answer['drained']}"
        if "busy" in answer:
            return f"waiting for {wanted} of {there} GPUs of {self.name}: {gpu_leases.names(answer['busy'])}"
        self._lease, self._gpus, self._joined = answer["lease"], tuple(answer["gpus"]), bool(answer["joined"])
        self.kept = answer["kept"]
        self.address, self._host_key = answer.get("address") or self.address, answer.get("host_key") or ""
        return ""

    def note_run(self, run: str, name: str, needs: Sequence[ArtifactId]) -> None:
        """Note on the machine which artifacts a run needs, so that `gc` keeps them."""
        if self._store.url is None:
            names = [artifact.directory for artifact in needs]
            self.remote.call("note_run", run=run, name=name, token=self.token, needs=names)

    def unclaim(self) -> None:
        """Give the GPUs back and keep the connection. An allocation is given back as a whole, in the end."""
        if self.remote.host.slurm is None:
            self.remote.call("release", token=self.token, for_good=False)
        self._lease, self._gpus, self.kept = None, (), None

    def place_servers(self, job: str) -> None:
        """Prepare the place of servers that may be kept for another run. Comes before they are started."""
        self.remote.call("place", job=job)

    def keep_servers(self, job: str, label: str, key: str, minutes: float) -> bool:
        """Keep servers for another run. False if they no longer run."""
        return bool(self.remote.call("keep", job=job, label=label, key=key, seconds=60 * minutes))

    def take_over(self, kept: str, job: str) -> bool:
        """Take over the servers of an earlier run as the job `job`. False if they have ended."""
        return bool(
            self.remote.call("take_over", old=kept, job=job, lease=self._lease, token=self.token, who=self._who)
        )

    def supply(self, stages: Sequence[Stage]) -> Iterator[str]:
        made = {stage.artifact for stage in stages}
        wanted = {artifact for stage in stages for artifact in stage.inputs.values()} - made
        for artifact in sorted(wanted, key=lambda artifact: artifact.directory):
            if not self.has(artifact):
                yield from self._send(artifact)
        trees = {
            tree.name: tree
            for stage in stages
            for external in stage.external.values()
            for tree in input_trees(external)
        }
        for tree in trees.values():
            if send_tree(self.remote, "inputs", tree.name, tree.root, tree.entries):
                yield f"sent {tree.root / tree.inside} to {self.name}"

    def placed(self, stage: Stage) -> Stage:
        return placed(stage, f"{self.remote.work}/inputs")

    def ship_library(self) -> None:
        """Send the library's code, unless it is there."""
        self._beat()
        root, entries = library_tree()
        self.code = tree_name(entries)
        send_tree(self.remote, "code", self.code, root, entries)

    def start(self, job: Job) -> None:
        if self._lease is None:
            raise LeaseLapsed(f"nothing is leased on {self.name} yet")
        if not self._start(job, self._lease):
            self._lease = None
            raise LeaseLapsed(f"the lease on {self.name} has expired: it had not heard from this run for too long")

    def start_beside(self, job: Job) -> None:
        """Start a job that needs no GPU and so no lease; on a cluster, all that is heavy is in an allocation."""
        if self.remote.host.slurm is None:
            self._start(job, None)
            return
        while self._lease is None or not self._start(job, self._lease):
            for said in self.claim([]):
                logger.info(said)

    def start_array(self, jobs: Sequence[Job], at_once: int | None) -> Iterator[str]:
        """Start jobs that are alike on a cluster, as one job array, without GPUs and without secrets; those that run
        already are left alone. At most so many run `at_once`. Yields why it must wait.

        Raises `BadInput` where Slurm refuses it, `MachineError` when it has waited too long.
        """
        yield from until_free(partial(self._submit_array, jobs, at_once or 0), self._settings.wait_hours)

    def watch(self, job: str, at: Offsets, wait: float) -> Watched:
        try:
            answer = self.remote.call(
                "watch", WATCH_SECONDS + wait, patience=0.0, job=job, log=at.log, metrics=at.metrics, wait=wait
            )
        except Unreachable as error:
            return Watched(JobStatus("unreachable", message=str(error)))
        return watched(answer)

    def attempt(self, job: str) -> Offsets:
        return Offsets(**self.remote.call("attempt", job=job))

    def cancel(self, job: str, asked_by: str | None = None) -> bool:
        deadline, patience = CANCEL_DEADLINE + MARGIN, CANCEL_DEADLINE
        return bool(self.remote.call("cancel", deadline, patience=patience, job=job, asked_by=asked_by))

    def hand(self, job: str, file: str, content: str) -> None:
        self.remote.call("hand", job=job, name=file, content=content)

    def checksums(self, job: str) -> Sequence[Mapping[str, Any]]:
        found: list[dict[str, Any]] = self.remote.call("checksums", CHECKSUM_SECONDS, job=job)
        return found

    def has(self, artifact: ArtifactId) -> bool:
        if self._store.url is not None:
            return self._store.has(artifact)
        try:
            self.manifest(artifact)
        except StoreError:
            return False
        return True

    def manifest(self, artifact: ArtifactId) -> Manifest:
        if self._store.url is not None:
            return self._store.manifest(artifact)
        if artifact not in self._manifests:
            content = self.remote.call("artifact", name=artifact.directory)
            if content is None:
                raise StoreError(f"{artifact.directory} is not on {self.name}")
            manifest = decode_manifest(content.encode(), f"{self.name}: {artifact.directory}")
            if manifest.artifact != artifact:
                raise StoreError(f"{self.name}: {artifact.directory} is another artifact's")
            self._manifests[artifact] = manifest
            note_elsewhere(self._store.home, self.name, manifest)
        return self._manifests[artifact]

    def fetch(self, artifact: ArtifactId, target: Path, below: str) -> None:
        entries = [entry for entry in self.manifest(artifact).files if entry.path.startswith(below)]
        incoming = self._incoming(artifact).with_suffix(f".{secrets.token_hex(4)}")
        try:
            self._fetch(artifact, entries, incoming)
            for entry in entries:
                (target / entry.path).parent.mkdir(parents=True, exist_ok=True)
                (incoming / FILES / entry.path).rename(target / entry.path)
        finally:
            shutil.rmtree(incoming, ignore_errors=True)

    def keep(self, artifact: ArtifactId) -> None:
        if self._store.has(artifact):
            return
        manifest = self.manifest(artifact)
        incoming = self._incoming(artifact)
        self._fetch(artifact, manifest.files, incoming)
        settle(manifest, incoming)
        LocalStore(self._store.home).adopt(manifest, incoming)

    def discard(self, artifacts: Sequence[ArtifactId]) -> None:
        self.remote.call("discard", names=[artifact.directory for artifact in artifacts])
        for artifact in artifacts:
            self._manifests.pop(artifact, None)
            forget_elsewhere(self._store.home, self.name, artifact.directory)

    def release(self) -> bool:
        """Patient no longer: a host that does not answer frees the GPUs by itself."""
        self._end.set()
        if self._heart.is_alive():
            self._heart.join()
        if not self.remote.work:  # it has never answered
            self.remote.close()
            return False
        try:
            self.remote.call("release", patience=0.0, token=self.token, for_good=True)
            busy = self.remote.call("busy", patience=0.0)
            return bool(busy["jobs"] or busy["leases"])
        except Unreachable:
            return True
        finally:
            self.remote.close()

    def _start(self, job: Job, lease: str | None) -> bool:
        secret = passed_variables(self._settings)
        variables = {**secret, **self._plain_variables()}
        deadline = START_DEADLINE + MARGIN
        if slurm := self.remote.host.slurm:
            job = replace(job, command=(*_container(slurm), *job.command))
            there: bool = self.remote.call(
                "start_allocated", deadline, job=asdict(job), variables=variables, secret=list(secret), lease=lease,
                node=self.node,
            )  # fmt: skip
            return there
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self._gpus))
        started: bool = self.remote.call(
            "start", deadline, job=asdict(job), variables=variables, lease=lease, token=self.token
        )
        return started

    def _plain_variables(self) -> dict[str, str]:
        return {"PYTHONPATH": f"{self.remote.work}/code/{self.code}", COMMIT_VARIABLE: git_commit() or ""}

    def _submit_array(self, jobs: Sequence[Job], at_once: int) -> str:
        slurm = self.remote.host.slurm
        assert slurm is not None, "arrays are of clusters"
        contained = [replace(job, command=(*_container(slurm), *job.command)) for job in jobs]
        settings = replace(self._settings, gpus=0, device="cpu")
        answer = self.remote.call(
            "start_array", ARRAY_SECONDS, wanted=[asdict(job) for job in contained], variables=self._plain_variables(),
            who=self._who, at_once=at_once,
            asked=submission(self.remote, for_arrays(slurm), settings, [Component(1)]),
        )  # fmt: skip
        if "refused" in answer:
            raise BadInput(f"{self.name}: Slurm refuses the job array: {answer['refused']}")
        return answer.get("waiting", "") and f"waiting for {self.name}: {answer['waiting']}"

    def _send(self, artifact: ArtifactId) -> Iterator[str]:
        if not self._store.has(artifact):
            raise MachineError(f"{artifact.directory} is neither here nor on {self.name} any more: run again")
        manifest = self._store.manifest(artifact)
        size = sum(entry.size for entry in manifest.files)
        yield f"sending {artifact.directory} ({size / 2**20:,.1f} MiB) to {self.name}"
        content = encode_manifest(manifest).decode()
        entries = [(entry.path, entry.size, entry.sha256) for entry in manifest.files]
        send_tree(self.remote, "artifacts", artifact.directory, self._store.open(artifact), entries, content)

    def _fetch(self, artifact: ArtifactId, entries: Sequence[FileEntry], incoming: Path) -> None:
        wanted = [(entry.path, entry.size, entry.sha256) for entry in entries]
        fetch_tree(self.remote, f"store/artifacts/{artifact.directory}/{FILES}", wanted, incoming)

    def _incoming(self, artifact: ArtifactId) -> Path:
        """The directory where it arrives. What has come stays there over a kill."""
        return self._store.home / "staging" / f"{artifact.directory}{ARRIVING}{self.name}.part"

    def _beat(self) -> None:
        """Start the heartbeat that tells the host of this run."""
        if self._heart.ident is None and not self.node:
            self._heart.start()

    def _beat_until_end(self) -> None:
        while not self._end.wait(BEAT_SECONDS):
            try:
                alive = self.remote.call("renew", WATCH_SECONDS, patience=0.0, lease=self._lease, token=self.token)
            except (MachineError, BadInput) as error:
                logger.debug("no beat: %s", error)
                continue
            if not alive:
                logger.debug("the lease on %s has lapsed", self.name)


def _container(slurm: Slurm) -> tuple[str, ...]:
    """The words of the command that runs jobs in a container; none without a container."""
    return tuple(map(literal, shlex.split(slurm.container or "")))


def watched(answer: Mapping[str, Any]) -> Watched:
    """An agent's answer, as it came. Raises `MachineError` when it is none."""
    try:
        said = answer["status"]
        status = JobStatus(said["state"], said.get("exit_status"), said.get("reason", ""), said.get("message", ""))
        return Watched(status, base64.b64decode(answer["log"]), base64.b64decode(answer["metrics"]))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MachineError(f"the machine's answer about a job can't be read: {error!r}") from None
