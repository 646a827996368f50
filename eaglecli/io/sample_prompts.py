"""Prompts of our own for commands that need some and were given none: sixteen kinds of text, short."""

import json

from eaglecli.io.records import PromptRecord, RecordKey

SOURCE = "built-in prompts"
PROMPTS = (
    "Explain in three sentences why the sky is dark at night.",
    "Write a Python function that returns the second largest number of a list.",
    "A train leaves at 9:40 and needs 2 hours and 35 minutes. When does it arrive? Show the steps.",
    "List five household objects that float and five that sink.",
    "Translate into French: The library closes at six, but the garden stays open until dark.",
    "Write a short story that begins with the words: The last key did not fit.",
    "Summarise what a compiler does for somebody who has never written a program.",
    "Give me a recipe for lentil soup as a numbered list.",
    "Is 221 a prime number? Answer and give the reason.",
    "Write an SQL query that counts the orders of every customer in the year 2020.",
    "Describe the water cycle as a dialogue between a cloud and a river.",
    "Correct the grammar: She don't has no time for go to the market yesterday.",
    'Return a JSON object with the keys "city", "country" and "population" for three large cities.',
    "What are the arguments for and against working from home?",
    "Repeat the word 'echo' ten times, each on a line of its own.",
    "Write a polite letter to a neighbour whose dog barks at night.",
)


def sample_records(limit: int) -> list[PromptRecord]:
    """The first `limit` of them, as if read from a file."""
    return [
        PromptRecord(RecordKey(index, json.dumps(f"sample-{index + 1}"), SOURCE, index + 1, None), text, text=text)
        for index, text in enumerate(PROMPTS[:limit])
    ]
