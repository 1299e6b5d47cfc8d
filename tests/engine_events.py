"""What tests of kd.Engine share: reading events, and waiting for counters."""

import time


def drain(engine, ids, seconds=60):
    """All events of these requests, by id, until each has ended."""
    events = {i: [] for i in ids}
    end = time.monotonic() + seconds
    while any(not e or e[-1].type != "end" for e in events.values()):
        assert time.monotonic() < end, f"no end of {[i for i, e in events.items() if not e or e[-1].type != 'end']}"
        for event in engine.poll(1000):
            if event.id in events:
                events[event.id].append(event)
    return events


def tokens_of(events):
    return [t for e in events for t in e.tokens]


def settled(engine):
    """The counters once all requests have ended: the engine thread publishes them a moment after the last event."""
    end = time.monotonic() + 10
    while True:
        stats = engine.stats()
        if stats["requests"] == stats["finished"] + stats["cancelled"] + stats["failed"] and not stats["streams"]:
            return stats
        assert time.monotonic() < end, stats
        time.sleep(0.001)


def nothing_left(engine):
    """No request, queue or event is left behind."""
    settled(engine)
    assert engine.poll() == []
    assert engine._flags == {} and set(engine._queues) == {0}
