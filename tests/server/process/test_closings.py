"""Closings in server/process/api_server.py: when the freed memory of connections is worth
returning."""

from server.process.api_server import MANY_CONNECTIONS, Closings

TIMEOUT_S = 10.0


def test_failed_handshakes_count_as_closed_once() -> None:
    closings = Closings(TIMEOUT_S)
    found = []
    for second in range(60):
        if second == 5:
            closings.num_accepted += MANY_CONNECTIONS
        if closings.are_many(float(second), num_open=0):
            found.append(second)

    assert len(found) == 1
    assert TIMEOUT_S < found[0] - 5 <= 3 * TIMEOUT_S


def test_open_connections_are_not_closed() -> None:
    closings = Closings(TIMEOUT_S)
    closings.num_accepted = MANY_CONNECTIONS

    assert not any(closings.are_many(float(now), MANY_CONNECTIONS) for now in range(60))
    assert any(closings.are_many(float(now), num_open=0) for now in range(60, 90))
