"""How many bad records a run puts up with."""

from dataclasses import dataclass


class TooManyErrors(Exception):
    """More records have failed than --max-errors or --max-error-rate allows."""


@dataclass(frozen=True)
class ErrorLimit:
    """Each limit may be None. The rate is of all records of the input, so the order of records does not matter.

    While the number of records is not known (a stream, `num_records` None) the rate waits.
    """

    max_errors: int | None
    max_error_rate: float | None

    def is_passed(self, num_failed: int, num_records: int | None) -> bool:
        """Whether so many are too many."""
        return self._sentence(num_failed, num_records) is not None

    def check(self, num_failed: int, num_records: int | None) -> None:
        """Raises TooManyErrors with the sentence for the user."""
        sentence = self._sentence(num_failed, num_records)
        if sentence is not None:
            raise TooManyErrors(sentence)

    def _sentence(self, num_failed: int, num_records: int | None) -> str | None:
        if self.max_errors is not None and num_failed > self.max_errors:
            return f"stopped: {num_failed} records failed, --max-errors allows {self.max_errors}"
        if self.max_error_rate is not None and num_records is not None and num_failed > self.max_error_rate * num_records:
            return f"stopped: {num_failed} of {num_records} records failed, --max-error-rate allows {self.max_error_rate:g}"
        return None
