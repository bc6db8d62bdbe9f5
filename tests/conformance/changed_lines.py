"""How many lines of a script were changed."""

from difflib import SequenceMatcher


def changed_line_count(before: str, after: str) -> int:
    """Lines added, removed and changed; one that was changed counts once."""
    matcher = SequenceMatcher(
        a=before.splitlines(), b=after.splitlines(), autojunk=False
    )
    return sum(
        max(before_stop - before_start, after_stop - after_start)
        for tag, before_start, before_stop, after_start, after_stop in (
            matcher.get_opcodes()
        )
        if tag != "equal"
    )
