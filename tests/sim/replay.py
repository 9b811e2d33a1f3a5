"""Replay one seed and print all that happened: ``python -m tests.sim.replay SEED``."""

from __future__ import annotations

import sys

from tests.sim.world import World


def main() -> None:
    world = World(int(sys.argv[1]))
    try:
        world.run()
    finally:
        print(world.spec)
        print("\n".join(world.journal.lines))


if __name__ == "__main__":
    main()
