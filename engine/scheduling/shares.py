"""How the prompt tokens of a step are shared out."""

from collections.abc import Sequence


def even_shares(demands: Sequence[int], tokens: int) -> list[int]:
    """Everybody gets the same, or all that they ask for; what doesn't divide goes to those that come first.

    The sum is `tokens`, or that of all `demands` where that is less. (Max-min fairness.)
    """
    shares = [0] * len(demands)
    left, by_demand = tokens, sorted(range(len(demands)), key=lambda index: demands[index])
    while by_demand:
        even = left // len(by_demand)
        index = by_demand[0]
        if demands[index] > even:
            break
        shares[index] = demands[index]
        left -= demands[index]
        del by_demand[0]
    for place, index in enumerate(sorted(by_demand)):
        shares[index] = left // len(by_demand) + (place < left % len(by_demand))
    return shares
