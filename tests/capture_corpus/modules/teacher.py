"""A teacher that once had an optimizer, averaged through `.data`."""

from __future__ import annotations

from capture_corpus.loop import Loop, matrix, sgd


def make() -> Loop:
    student, teacher = matrix(), matrix()
    sgd([teacher])()
    write = lambda: teacher.data.mul_(0.5).add_(student.data, alpha=0.5)  # noqa: E731
    return Loop({"student": student, "teacher": teacher}, sgd([student]), write)
