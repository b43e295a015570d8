"""The client of Ray's dashboard, on real Ray: each fact of Ray that launches rest on is a test."""

import io
import zipfile

import attrs
import pytest
import trio

from ichat.ray.api import RayApi, RayRefused, RayUnknown, job_log
from ichat.ray.values import RaySubmission

LIMIT_S = 60
NEVER = RaySubmission("never", "sleep 300", gpus=5)
"""No node has so many GPUs."""


@pytest.fixture
def api(cluster):
    return RayApi(cluster.address, ask_s=LIMIT_S)


@pytest.fixture
def token_api(fragile_cluster):
    return RayApi(fragile_cluster.address, fragile_cluster.token)


def package_of(text):
    """Return a zip with a script."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("script.sh", text)
    return file.getvalue()


async def until(ask, condition):
    """Return the first answer that fulfils the condition."""
    with trio.fail_after(LIMIT_S):
        while True:
            answer = await ask()
            if condition(answer):
                return answer
            await trio.sleep(0.05)


async def end_of(api, job_id):
    return await until(lambda: api.job(job_id), lambda job: job.is_over)


async def run(api, job):
    """Submit a job; return how it has ended, and its output."""
    await api.submit(job)
    ended = await end_of(api, job.id)
    return ended, "\n".join(await api.last_lines(ended.node_id, job_log(job.id), 50)) if ended.node_id else ""


async def test_a_cluster_has_a_version_and_a_name_of_its_start(api):
    """The name differs from that of another start."""
    found = await api.version()
    assert found.ray.startswith("2.60.")
    assert found.session.startswith("session_")


async def test_nodes_of_ray_are_known_by_address_labels_and_gpus(api, cluster):
    """A declared GPU has no hardware."""
    nodes, hardware = await api.nodes(), await until(api.hardware, lambda found: len(found) == 3)
    assert [(node.gpus, node.labels.get("zone")) for node in nodes if node.is_head] == [(0, None)]
    assert sorted((node.gpus, node.labels["zone"]) for node in nodes if not node.is_head) == [(4, "a"), (4, "b")]
    assert {(node.ip, node.is_alive) for node in nodes} == {(cluster.ip, True)}
    assert hardware.keys() == {node.id for node in nodes}
    for one in hardware.values():
        assert one.cpus
        assert one.memory_total_bytes > one.memory_available_bytes > 0
        assert list(one.gpus) == []
        assert one.agent_port


async def test_a_job_on_ray_gets_its_package_its_variables_and_its_gpus(api):
    """The node, the exit code and the metadata are known afterwards; the output is in a file of the node."""
    script = 'echo "devices=$CUDA_VISIBLE_DEVICES word=$WORD"; exit 7'
    job = RaySubmission(
        "packed", "sh script.sh", {"ichat.owner": "o"}, gpus=2, labels={"zone": "in(a,c)"},
        package=await api.upload(package_of(script)), env={"WORD": "w"},
    )  # fmt: skip
    ended, output = await run(api, job)
    assert (ended.status, ended.exit_code, ended.metadata) == ("FAILED", 7, {"ichat.owner": "o"})
    assert "devices=0,1 word=w" in output
    nodes = {node.id: node for node in await api.nodes()}
    assert nodes[ended.node_id].labels["zone"] == "a"
    assert ended in await api.jobs()


async def test_a_job_without_gpus_has_no_variable_of_devices(api):
    ended, output = await run(api, RaySubmission("bare", 'echo "devices=${CUDA_VISIBLE_DEVICES-unset}"'))
    assert ended.status == "SUCCEEDED"
    assert "devices=unset" in output


async def test_a_job_that_is_over_can_be_deleted(api):
    """Ray forgets it then."""
    await api.submit(RaySubmission("over", "true", gpus=1.5))  # fails at once
    await end_of(api, "over")
    await api.delete("over")
    assert await api.job("over") is None


async def test_two_jobs_with_half_a_gpu_share_it(api):
    """Both see one GPU, and the same one."""
    shown = []
    job = RaySubmission("half", 'echo "devices=$CUDA_VISIBLE_DEVICES"; sleep 300', gpus=0.5, labels={"zone": "b"})
    for number in range(2):
        await api.submit(attrs.evolve(job, id=f"half-{number}"))
    for number in range(2):
        name = f"half-{number}"
        running = await until(lambda name=name: api.job(name), lambda found: found.node_id)
        lines = await until(
            lambda node=running.node_id, name=name: api.last_lines(node, job_log(name), 5),
            lambda lines: any(line.startswith("devices=") for line in lines),
        )
        shown += [line for line in lines if line.startswith("devices=")]
    assert len(shown) == 2
    assert len(set(shown)) == 1
    for number in range(2):
        await api.stop(f"half-{number}")


async def test_a_package_is_sent_once(api, cluster):
    """A package that Ray has is only pinned."""
    package = package_of("a package that is sent once")
    uri = await api.upload(package)
    answer = await api._ask("GET", f"/api/packages/gcs/{uri.removeprefix('gcs://')}")
    assert answer.status == 200
    assert await api.upload(package) == uri
    log = next(cluster.directory.glob("session_latest/logs/dashboard_JobHead.log")).read_text()
    assert log.count(f"Uploading package {uri}") == 1


async def test_a_job_that_is_submitted_twice_runs_once(api):
    job = RaySubmission("twice", "echo once; sleep 300")
    await api.submit(job)
    await api.submit(job)
    assert [one.id for one in await api.jobs()].count("twice") == 1
    running = await until(lambda: api.job("twice"), lambda found: found.status == "RUNNING")
    await api.submit(job)
    again = await api.job("twice")
    assert again.submitted_at == running.submitted_at
    await api.stop("twice")
    assert (await end_of(api, "twice")).status == "STOPPED"


async def test_a_submission_that_is_cancelled_is_completed(api):
    """Ray would run it in any case."""
    with trio.CancelScope() as scope:
        scope.cancel()
        await api.submit(RaySubmission("cancelled", "true"))
    assert scope.cancelled_caught is False
    assert (await end_of(api, "cancelled")).status == "SUCCEEDED"


async def test_a_submission_that_ray_refuses_has_its_sentence(api):
    with pytest.raises(RayRefused, match=r"^Invalid label selector value `in\(`\. ") as refused:
        await api.submit(RaySubmission("refused", "true", labels={"zone": "in("}))
    assert "Traceback" not in str(refused.value)
    assert not refused.value.is_about_token
    assert await api.job("refused") is None


async def test_a_job_of_one_and_a_half_gpus_fails_with_a_sentence(api):
    await api.submit(RaySubmission("broken", "true", gpus=1.5))
    ended = await end_of(api, "broken")
    assert (ended.status, ended.error_type) == ("FAILED", "JOB_SUPERVISOR_ACTOR_START_FAILURE")
    assert ended.message.endswith("The specified quantity 1.5 is invalid.')")
    assert "Traceback" not in ended.message


async def test_a_program_that_is_missing_on_the_node_has_its_exit_code(api):
    ended, output = await run(api, RaySubmission("missing", "exec /opt/nowhere/bin/python3"))
    assert (ended.status, ended.exit_code) == ("FAILED", 127)
    assert "/opt/nowhere/bin/python3: not found" in output


async def test_a_pending_job_of_ray_is_not_stopped_and_not_deleted(api):
    """Its demand is in the report; the free resources of the nodes are there too."""
    await api.submit(NEVER)
    await api.stop(NEVER.id)
    with pytest.raises(RayRefused, match="Attempted to delete job 'never', but it is in a non-terminal state PENDING"):
        await api.delete(NEVER.id)
    job = await api.job(NEVER.id)
    assert (job.status, job.node_id, job.exit_code) == ("PENDING", "", None)
    assert job.message.startswith("Job has not started yet.")
    room = await until(api.free, lambda room: any(one.resources.get("GPU") == 5 for one in room.demand))
    assert room.free.keys() == {node.id for node in await api.nodes()}
    assert min(one.get("GPU", 0) for one in room.free.values()) == 0
    assert list(room.coming) == []


async def test_a_job_that_ray_does_not_have_is_no_error(api):
    assert await api.job("nowhere") is None
    await api.stop("nowhere")
    await api.delete("nowhere")


async def test_lines_of_an_unknown_file_are_not_known(api):
    node = next(iter(await api.nodes()))
    with pytest.raises(RayUnknown, match="500 A file is not found"):
        await api.last_lines(node.id, job_log("nowhere"), 5)


@pytest.mark.parametrize(("token", "status"), [("", 401), ("wrong-token-of-thirty-two-letters", 403)])
async def test_a_wrong_token_of_ray_is_refused(fragile_cluster, token, status):
    api = RayApi(fragile_cluster.address, token)
    for ask in (api.version, api.nodes, lambda: api.submit(RaySubmission("none", "true"))):
        with pytest.raises(RayRefused, match=rf"^{status} ") as refused:
            await ask()
        assert refused.value.is_about_token
        assert "Traceback" not in str(refused.value)


@pytest.mark.breaks
async def test_parts_of_ray_that_end_are_known_or_not_known(token_api, fragile_cluster):
    """A node without its raylet is dead, with a reason. Without the head's store, and without a dashboard, nothing is known."""
    await token_api.version()
    assert await token_api.job("before") is None
    node = next(one for one in await token_api.nodes() if not one.is_head)
    assert fragile_cluster.kill("raylet", node.id) == 1
    dead = await until(token_api.nodes, lambda nodes: [one for one in nodes if one.id == node.id and not one.is_alive])
    assert next(one for one in dead if one.id == node.id).state_message
    assert fragile_cluster.kill("gcs_server") == 1
    for ask in (token_api.nodes, lambda: token_api.job("before"), token_api.free):
        with pytest.raises(RayUnknown):
            await ask()
    fragile_cluster.kill("dashboard.py")
    with pytest.raises(RayUnknown, match="Connection refused"):
        await token_api.version()
