"""What the machine code says of the order in which a kernel loads and uses."""

import re


def loads_before_use(sass: str) -> tuple[int, int]:
    """How many loads of 16 bytes start before a value of one is used, and how many do.

    Counted up to the first atomic operation, in the order of the machine code.
    """
    lines = sass[: sass.find("ATOMG")].splitlines()
    values: set[str] = set()
    n_before = n_loads = 0
    used = False
    for line in lines:
        _, _, operands = re.sub(r"@!?U?P\d+ ", "", line.strip()).partition(" ")
        target, *sources = operands.split(",")
        used |= any(values & {*re.findall(r"\bR\d+", source)} for source in sources)
        if loaded := re.search(r"LDG\S*\.128\S* R(\d+)", line):
            first = int(loaded[1])
            values |= {f"R{register}" for register in range(first, first + 4)}
            n_loads += 1
            n_before += not used
        else:
            values -= {target.strip()}
    return n_before, n_loads
