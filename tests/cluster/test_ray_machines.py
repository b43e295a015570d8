"""The nodes of a real cluster of Ray as machines of a real gateway."""


def test_nodes_of_a_real_cluster_are_a_machine_of_the_gateway(cluster, gateway):
    """The gateway is on the machine of all three raylets, which have eight GPUs for jobs, and no driver."""
    program = gateway(f'[ray]\naddress = "{cluster.address}"\n')

    def machines():
        return program.get("/v1/admin/cluster/status")[1]["machines"]

    program.until(lambda: machines()[0]["ray"] and machines()[0]["ray"]["gpus_free"] is not None)
    [machine] = machines()
    assert machine["has_gateway"]
    assert machine["ray"]["raylets"] == 3
    assert machine["ray"]["gpus"] == 8
    assert 0 <= machine["ray"]["gpus_free"] <= 8
    assert machine["ray"]["unanswered_since"] is None
    assert program.stop() == 0
