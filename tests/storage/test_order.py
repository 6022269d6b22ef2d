"""Who goes next, and what becomes of those behind a page that is lost."""

from __future__ import annotations

import gc

from sglcache.storage.order import LOST, NONE, Order


def digest(number: int) -> bytes:
    return number.to_bytes(16, "big")


def add(order: Order, number: int, parent: int = 0, used: int | None = None) -> int:
    row = order.row(digest(parent)) if parent else NONE
    return order.add(digest(number), row, 1, number, number if used is None else used)


def drained(order: Order) -> list[int]:
    gone = []
    while (row := order.victim()) != NONE:
        gone.append(int.from_bytes(order.remove(row), "big"))
    return gone


def test_a_page_is_as_fresh_as_what_was_behind_it() -> None:
    order = Order(16)
    add(order, 1)
    add(order, 2, parent=1)
    add(order, 3)
    order.use([order.row(digest(2))], 9)
    assert drained(order) == [3, 2, 1]
    add(order, 1)
    add(order, 2, parent=1)
    order.use([order.row(digest(2))], 9)
    order.remove(order.row(digest(2)))
    add(order, 3, used=5)
    assert drained(order) == [3, 1]
    assert (len(order), order.num_bytes) == (0, 0)


def test_what_is_kept_is_no_victim_and_stays_in_order() -> None:
    order = Order(16)
    add(order, 1)
    keep = order.row(digest(1))
    assert order.victim(keep) == NONE
    add(order, 2)
    assert order.victim(keep) == order.row(digest(2))
    assert order.victim(keep) == order.row(digest(2))
    assert drained(order) == [1, 2]


def test_those_behind_a_lost_page_wait_for_it_and_hang_on_nobody_else() -> None:
    order = Order(16)
    for number, parent in ((1, 0), (2, 1), (3, 2), (4, 2)):
        add(order, number, parent)
    lost = order.row(digest(2))
    order.remove(lost)
    assert order.parent(order.row(digest(3))) == LOST
    assert add(order, 5, used=6) == lost  # another page in its row
    assert order.victim() == order.row(digest(1))  # no leaf but for the loss
    order.remove(order.row(digest(4)))
    add(order, 4, parent=5, used=7)  # it came back elsewhere
    add(order, 2, parent=1, used=8)
    assert order.parent(order.row(digest(3))) == order.row(digest(2))
    assert order.parent(order.row(digest(4))) == order.row(digest(5))
    assert drained(order) == [3, 4, 5, 2, 1]


def test_the_order_of_coming_is_by_number() -> None:
    order = Order(16)
    for number in (5, 3, 9):
        add(order, number)
    order.remove(order.row(digest(5)))
    add(order, 7)
    assert [order.number(row) for row in order.by_number()] == [3, 7, 9]


def test_pages_are_nothing_to_the_cycle_collector() -> None:
    """Else a store of a million pages would stop the process for its sake."""
    order = Order(16)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(1, 5000):
        add(order, number, parent=number - 1)
    assert len(gc.get_objects()) - before < 50
    assert not gc.is_tracked(order._rows)
