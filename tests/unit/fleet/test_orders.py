"""Orders as pure values: which code is for which order, and which keys count; and the file that keeps them."""

import json
import stat

import attrs
import pytest

from ichat.errors import Exit
from ichat.fleet.order_file import load_orders, save_orders
from ichat.fleet.order_store import ADDRESSES_MAX, WRONG_CODES_MAX, WrongCodes
from ichat.fleet.orders import AGAIN_S, ENDED_MAX, LIVE_MAX, OrderPlace, Orders, RemoteOrder
from ichat.security.keys import hash_of

TABLE = {"model_name": "m", "model_path": "/m", "env": {"A": "secret"}}
NOW = 1_000_000.0


def made(orders=None, worker_id="w", valid_s=100.0):
    return (orders or Orders()).with_new(worker_id, TABLE, NOW, valid_s)


def test_a_code_is_known_by_its_hash_alone():
    orders, order, code = made()
    assert len(code) > 43
    assert code not in repr(orders)
    assert (orders.find(code), orders.find(code + "x")) == (order, None)


@pytest.mark.parametrize(
    ("start_id", "age_s", "fate"),
    [("a", 0.0, "again"), ("a", AGAIN_S, "again"), ("a", AGAIN_S + 1, "used"), ("b", 0.0, "used")],
)
def test_only_the_process_that_has_fetched_an_order_gets_it_again(start_id, age_s, fate):
    orders, order, _ = made()
    orders, fetched = orders.with_fetched(order, "a", "10.0.0.7", NOW + 5)
    assert fetched.fate(start_id, "10.0.0.8", NOW + 5 + age_s) == fate
    assert orders.by_launch[1] == fetched
    assert hash_of(fetched.key) == fetched.key_hash


@pytest.mark.parametrize(("age_s", "fate"), [(0.0, "first"), (100.0, "first"), (100.1, "late")])
def test_a_code_that_is_not_used_in_time_is_dead(age_s, fate):
    assert made()[1].fate("a", "10.0.0.7", NOW + age_s) == fate


@pytest.mark.parametrize(
    ("senders", "fate"),
    [(None, "first"), ([], "early"), (["10.0.0.7"], "first"), (["10.0.0.0/24"], "first"), (["10.0.1.7"], "elsewhere")],
)
def test_an_order_is_for_the_senders_of_its_place(senders, fate):
    """The code is as good as before for the right sender; a unix socket has no address."""
    orders, order, _ = made()
    order = attrs.evolve(order, place=OrderPlace(senders))
    assert order.fate("a", "10.0.0.7", NOW) == fate
    assert (order.fate("a", "", NOW) == "first") == (senders is None)
    assert order.fate("a", "10.0.0.7", NOW + 101) == "late"
    fetched = orders.with_fetched(order, "a", "10.0.0.7", NOW)[1]
    assert fetched.fate("a", "10.9.9.9", NOW + 1) == "again"


def test_a_later_order_of_a_worker_ends_the_earlier_one():
    """Its number is higher; the code and the key of the order before are dead, and its variables are forgotten."""
    orders, order, code = made()
    orders, _ = orders.with_fetched(order, "a", "10.0.0.7", NOW)
    orders, later, _ = made(orders)
    before = orders.find(code)
    assert (later.launch, orders.live("w")) == (2, later)
    assert (before.fate("a", "10.0.0.7", NOW), before.key, before.table) == ("late", "", {})
    assert before.key_hash
    assert (orders.live("x"), made(orders, "x")[1].launch) == (None, 3)


def test_orders_are_bounded():
    """Ended and overdue orders make room for others; the newest of the ended orders are remembered."""
    found = {n: RemoteOrder(f"w{n}", n, TABLE, str(n), NOW, NOW + 10) for n in range(1, LIVE_MAX + 1)}
    orders = Orders(found, LIVE_MAX)
    assert orders.is_full(NOW)
    assert not orders.is_full(NOW + 11)
    orders = Orders({n: attrs.evolve(one, ended="was stopped") for n, one in found.items()}, LIVE_MAX)
    assert not orders.is_full(NOW)
    for _ in range(3):
        orders, _, _ = made(orders)
    ended = [one.launch for one in orders.by_launch.values() if one.ended]
    assert (len(ended), min(ended)) == (ENDED_MAX, 3)


def test_the_file_has_everything_and_is_private(tmp_path):
    path = str(tmp_path / "orders.json")
    orders, order, _ = made()
    orders, _ = orders.with_fetched(order, "a", "10.0.0.7", NOW)
    place = OrderPlace(["10.0.0.7"], "10.0.0.7", "20000-20999", ends_with_parent=True)
    orders = orders.with_changed(attrs.evolve(orders.by_launch[1], end_at=NOW + 9, place=place))
    save_orders(path, orders)
    assert load_orders(path) == orders
    assert stat.S_IMODE((tmp_path / "orders.json").stat().st_mode) == 0o600
    assert load_orders(str(tmp_path / "none")) == Orders()


@pytest.mark.parametrize("text", ["", "[]", '{"version": 2}', '{"version": 1, "newest": 1, "orders": [{}]}'])
def test_a_damaged_file_stops_the_start(tmp_path, text):
    """A gateway that knew none of the keys would refuse every worker that an order has started."""
    path = tmp_path / "orders.json"
    path.write_text(text)
    with pytest.raises(Exit) as refused:
        load_orders(str(path))
    assert refused.value.code == 69


def test_no_repr_shows_a_key():
    shown = repr(RemoteOrder("w", 1, {}, "hash", NOW, NOW, key="sk-secret", start_id="start"))
    assert "sk-secret" not in shown
    assert "start'" not in shown
    assert json.dumps(attrs.asdict(made()[1]))


def test_wrong_codes_are_counted_for_a_minute_and_for_some_addresses():
    wrong = WrongCodes()
    for _ in range(WRONG_CODES_MAX):
        assert wrong.may_ask("a", 0.0)
        wrong.count("a", 0.0)
    assert (wrong.may_ask("a", 30.0), wrong.may_ask("b", 30.0)) == (False, True)
    assert wrong.may_ask("a", 62.0)
    for number in range(2 * ADDRESSES_MAX):
        wrong.count(f"c{number}", 100.0)
    assert len(wrong._by_address) == ADDRESSES_MAX
