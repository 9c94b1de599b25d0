"""The sentences of the word problems: what can happen, how it is told, and what to compute from it.

A problem is a start, some events and an end, all about one running amount x of one thing. Each of them is a `Kind`:
numbers to draw, one or two operations that lead from the old x to the new one, and several ways to say it. `told` is
what training and the first two test splits use; `unseen` is kept for the third split, which asks what happens when
only the wording is new.

Placeholders: A the main person, B another one, t the thing ("shells", "liters of milk"), c and c1 its containers in
plural and singular, n and m numbers, k a small factor, w the factor in words ("twice", "3 times"), f a fraction in
words ("half of"). An operation names two operands among x, n, m, k, p (the result of the operation before).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """`ops` such as ("k*m", "x+p"); the last result is the new x. `result` is who has it: A, B, or both."""

    ops: tuple[str, ...]
    told: tuple[str, ...]
    unseen: tuple[str, ...]


START: dict[str, Kind] = {
    "have": Kind(
        (),
        (
            "{A} has {n} {t}.",
            "{A} owns {n} {t}.",
            "{A} starts the week with {n} {t}.",
            "There are {n} {t} in the house of {A}.",
            "{A} counts {n} {t} in the morning.",
            "At first {A} has {n} {t}.",
            "{A} brings {n} {t} from home.",
        ),
        ("On Monday {A} finds out that there are {n} {t} left.", "A total of {n} {t} belongs to {A}."),
    ),
    "two_places": Kind(
        ("n+m",),
        (
            "{A} has {n} {t} at home and {m} {t} at school.",
            "{A} gets {n} {t} from {B} and {m} {t} from the shop.",
            "{A} keeps {n} {t} in the kitchen and {m} in the garden.",
            "In the morning {A} collects {n} {t}, and in the evening {m} more.",
            "{A} has {n} old {t} and {m} new {t}.",
            "{A} finds {n} {t} on Monday and {m} {t} on Tuesday.",
        ),
        ("Besides {n} {t} at work, {A} has {m} in the car.", "{A} adds {n} {t} to the {m} that were there before."),
    ),
    "containers": Kind(
        ("k*m",),
        (
            "{A} has {k} {c} with {m} {t} each.",
            "{A} fills {k} {c} with {m} {t} each.",
            "{A} buys {k} {c}, and every {c1} holds {m} {t}.",
            "There are {k} {c} in the room of {A}, each with {m} {t}.",
            "{A} owns {k} {c} of {m} {t} each.",
            "{A} gets {k} {c}. There are {m} {t} in each {c1}.",
        ),
        ("With {m} {t} per {c1}, {A} sets up {k} {c}.", "{A} carries {k} {c} home; {m} {t} fit into one {c1}."),
    ),
    "more_than": Kind(
        ("n+m",),
        (
            "{B} has {n} {t}. {A} has {m} more than {B}.",
            "{B} owns {n} {t}, and {A} owns {m} more than that.",
            "{A} has {m} more {t} than {B}, who has {n}.",
            "{B} counts {n} {t}. {A} counts {m} more.",
            "While {B} has {n} {t}, {A} has {m} more.",
        ),
        ("{B} ends up with {n} {t} and {A} beats that by {m}.", "{A} is {m} {t} ahead of {B}, who holds {n}."),
    ),
    "fewer_than": Kind(
        ("n-m",),
        (
            "{B} has {n} {t}. {A} has {m} fewer than {B}.",
            "{B} owns {n} {t}, and {A} owns {m} fewer than that.",
            "{A} has {m} fewer {t} than {B}, who has {n}.",
            "{B} counts {n} {t}. {A} counts {m} fewer.",
            "While {B} has {n} {t}, {A} has {m} fewer.",
        ),
        ("{B} ends up with {n} {t} and {A} falls {m} short of that.", "{A} is {m} {t} behind {B}, who holds {n}."),
    ),
    "times_other": Kind(
        ("n*k",),
        (
            "{B} has {n} {t}. {A} has {w} as many as {B}.",
            "{A} has {w} as many {t} as {B}, who has {n}.",
            "{B} owns {n} {t}, and {A} owns {w} as many.",
            "{B} counts {n} {t}. {A} counts {w} that number.",
            "While {B} has {n} {t}, {A} has {w} as many.",
        ),
        ("{A} reaches {w} the {n} {t} of {B}.", "Compared with the {n} {t} of {B}, {A} has {w} the amount."),
    ),
    "daily": Kind(
        ("k*m",),
        (
            "{A} collects {m} {t} every day for {k} days.",
            "For {k} days {A} gets {m} {t} a day.",
            "{A} puts {m} {t} aside each week for {k} weeks.",
            "Every day {A} buys {m} {t}, and does so for {k} days.",
            "{A} receives {m} {t} a week during {k} weeks.",
        ),
        ("{k} days in a row {A} brings home {m} {t}.", "At {m} {t} a day, {A} keeps collecting for {k} days."),
    ),
    "shared": Kind(
        ("n/k",),
        (
            "{A} and some friends, {k} people in all, share {n} {t} equally.",
            "{n} {t} are shared equally among {k} children, and {A} is one of them.",
            "{B} gives {n} {t} to {k} people in equal parts. {A} is one of them.",
            "A group of {k} people divides {n} {t} equally, and {A} takes one part.",
            "{B} splits {n} {t} into {k} equal parts and gives one part to {A}.",
        ),
        (
            "{A} gets an equal part of {n} {t} that go to {k} people.",
            "Of {n} {t} dealt out evenly to {k} friends, {A} gets a share.",
        ),
    ),
}

EVENT: dict[str, Kind] = {
    "gain": Kind(
        ("x+n",),
        (
            "Then {A} buys {n} more {t}.",
            "{A} finds {n} more {t}.",
            "{B} gives {n} {t} to {A}.",
            "{A} gets another {n} {t}.",
            "The next day {A} receives {n} {t} from {B}.",
            "After that {A} wins {n} {t}.",
            "A neighbor brings {A} {n} more {t}.",
        ),
        ("{B} hands over {n} {t} to {A}.", "With luck {A} picks up {n} extra {t}."),
    ),
    "lose": Kind(
        ("x-n",),
        (
            "Then {A} gives {n} {t} to {B}.",
            "{A} loses {n} {t}.",
            "{A} sells {n} of the {t}.",
            "{A} uses {n} {t}.",
            "The next day {n} {t} are gone.",
            "{B} takes {n} {t} from {A}.",
            "After that {A} has to throw away {n} {t}.",
        ),
        ("{A} parts with {n} {t}.", "{n} of the {t} get stolen."),
    ),
    "times": Kind(
        ("x*k",),
        (
            "By the end of the year {A} has {w} as many {t}.",
            "Then the number of {t} grows to {w} what it was.",
            "{A} works hard and now has {w} as many {t} as before.",
            "A month later {A} has {w} as many.",
            "Thanks to {B}, {A} gets to {w} as many {t}.",
        ),
        ("The amount rises to {w} the old one.", "In the end it becomes {w} as much."),
    ),
    "keep_part": Kind(
        ("x/k",),
        (
            "{A} keeps only {f} the {t} and gives away the rest.",
            "Only {f} the {t} are left after a week.",
            "{A} puts the {t} into {k} equal groups and keeps one group.",
            "After a storm only {f} the {t} can be used.",
            "{A} divides the {t} equally among {k} people and is one of them.",
        ),
        ("Everything but {f} the {t} is lost.", "{A} ends up with {f} what was there."),
    ),
    "give_part": Kind(
        ("x/k", "x-p"),
        (
            "{A} gives {f} the {t} to {B}.",
            "{A} sells {f} the {t}.",
            "Then {A} uses {f} the {t}.",
            "{A} loses {f} the {t} on the way.",
            "{B} borrows {f} the {t}.",
        ),
        ("{f1} the {t} go to {B}.", "{A} has to do without {f} the {t}."),
    ),
    "packs_in": Kind(
        ("k*m", "x+p"),
        (
            "Then {A} buys {k} {c} of {m} {t} each.",
            "{B} brings {k} {c} with {m} {t} in each.",
            "{A} gets {k} more {c}, each with {m} {t}.",
            "{A} opens {k} {c} and finds {m} {t} in every {c1}.",
            "For {k} days {A} gets {m} more {t} each day.",
        ),
        ("{k} {c} arrive for {A}, {m} {t} per {c1}.", "{A} earns {m} {t} an hour for {k} hours."),
    ),
    "packs_out": Kind(
        ("k*m", "x-p"),
        (
            "Then {A} sells {k} {c} of {m} {t} each.",
            "{A} gives {m} {t} to each of {k} friends.",
            "{A} uses {m} {t} a day for {k} days.",
            "{A} packs {k} {c} with {m} {t} each and sends them to {B}.",
            "Each of {k} visitors takes {m} {t}.",
        ),
        ("{k} guests leave with {m} {t} each.", "At {m} {t} a day, {A} spends {k} days using them up."),
    ),
    "two_gains": Kind(
        ("n+m", "x+p"),
        (
            "{A} finds {n} {t} in the morning and {m} in the afternoon.",
            "{B} brings {n} {t} and a friend brings {m}.",
            "Then {A} buys {n} {t} on Friday and {m} {t} on Saturday.",
            "{A} wins {n} {t} in one game and {m} in another game.",
        ),
        ("First {n} and later {m} more {t} come in.", "Two gifts follow, one of {n} {t} and one of {m}."),
    ),
    "two_losses": Kind(
        ("n+m", "x-p"),
        (
            "{A} gives {n} {t} to {B} and {m} to a friend.",
            "{A} sells {n} {t} on Friday and {m} {t} on Saturday.",
            "Then {A} uses {n} {t} at home and {m} at work.",
            "{A} loses {n} {t} in one game and {m} in another game.",
        ),
        ("First {n} and later {m} {t} disappear.", "Two orders take {n} and {m} {t} away."),
    ),
    "swap": Kind(
        ("x-n", "p+m"),
        (
            "{A} gives {n} {t} to {B} and gets {m} back.",
            "{A} sells {n} {t} and then buys {m} new ones.",
            "{A} loses {n} {t}, but finds {m} others.",
            "{A} trades {n} {t} for {m} better ones.",
        ),
        ("{n} {t} go out and {m} come in.", "In exchange for {n} {t}, {A} accepts {m} others."),
    ),
    "nothing": Kind(
        (),
        (
            "{B} is {n} years old.",
            "{B} lives in house number {n}.",
            "The shop of {B} is open for {k} hours a day.",
            "It takes {A} {n} minutes to count them.",
            "{B} has {n} pictures on the wall.",
        ),
        ("Outside it is {n} degrees.", "{A} walked {k} miles that day."),
    ),
}  # fmt: skip

END: dict[str, Kind] = {
    "now": Kind(
        (),
        (
            "How many {t} does {A} have now?",
            "How many {t} does {A} have in the end?",
            "How many {t} are left for {A}?",
            "What number of {t} does {A} have now?",
        ),
        ("Find the number of {t} that {A} has at last.", "What does {A} count in {t} by then?"),
    ),
    "together": Kind(
        ("x+n",),
        (
            "{B} has {n} {t}. How many {t} do they have together?",
            "If {B} has {n} {t}, how many do {A} and {B} have in total?",
            "How many {t} do they have in total if {B} has {n}?",
            "{B} adds {n} other {t}. How many {t} are there in all?",
        ),
        ("Taking in the {n} {t} of {B}, what do both own?", "{B} holds {n}. What is the sum for the two?"),
    ),
    "more_than": Kind(
        ("x-n",),
        (
            "{B} has {n} {t}. How many more {t} does {A} have than {B}?",
            "If {B} has {n} {t}, how many more does {A} have?",
            "How many more {t} than {B}, who has {n}, does {A} have?",
        ),
        ("By how many {t} does {A} lead {B}, who has {n}?", "What is the difference to the {n} {t} of {B}?"),
    ),
    "goal": Kind(
        ("n-x",),
        (
            "{A} wants to have {n} {t}. How many more {t} are needed?",
            "How many more {t} does {A} need to have {n}?",
            "{A} needs {n} {t} in all. How many {t} are missing?",
        ),
        ("How far is {A} from a goal of {n} {t}?", "The plan says {n}. What is still to be collected?"),
    ),
    "price": Kind(
        ("x*k",),
        (
            "{A} sells all of them for {k} dollars each. How many dollars does {A} get?",
            "How many dollars does {A} earn by selling them for {k} dollars each?",
            "Each is worth {k} dollars. How many dollars are they worth in all?",
        ),
        ("At {k} dollars apiece, what does {A} take in?", "What do they cost if one costs {k} dollars?"),
    ),
    "share": Kind(
        ("x/k",),
        (
            "{A} shares them equally among {k} friends. How many {t} does each friend get?",
            "How many {t} does each of {k} children get if {A} shares them equally?",
            "{A} puts them into {k} equal groups. How many {t} are in each group?",
        ),
        ("Divided evenly by {k}, how large is one part?", "What does one of {k} people get in a fair split?"),
    ),
    "boxes": Kind(
        ("x/k",),
        (
            "{A} packs them into {c} of {k} each. How many {c} does {A} need?",
            "How many {c} does {A} need if each {c1} holds {k} of them?",
            "If {k} of them fit into one {c1}, how many {c} are needed?",
        ),
        ("A {c1} takes {k}. What number of {c} is filled?", "With {k} per {c1}, count the {c}."),
    ),
    "other_times": Kind(
        ("x*k",),
        (
            "{B} has {w} as many {t} as {A}. How many {t} does {B} have?",
            "If {B} has {w} as many, how many {t} does {B} have?",
            "How many {t} does {B} have with {w} as many as {A}?",
        ),
        ("{B} reaches {w} that. What does {B} own?", "What is {w} this number, which is what {B} has?"),
    ),
    "both_times": Kind(
        ("x*k", "x+p"),
        (
            "{B} has {w} as many {t} as {A}. How many {t} do they have together?",
            "If {B} has {w} as many, how many {t} do {A} and {B} have in total?",
            "How many {t} do both have if {B} has {w} as many as {A}?",
        ),
        ("{B} has {w} that. What do the two own in sum?", "Count both when {B} reaches {w} the number of {A}."),
    ),
}


def words(text: str) -> list[str]:
    return text.split()


NAMES = words("""
    Mia Tom Anna Ben Lena Paul Nora Max Emma Jack Lily Sam Ruth Omar Sara Leo Maria Ali Julia Adam Rosa Eric Nina Ivan
    Clara Hugo Zoe Finn Ella Noah Iris Karl Lucy Theo Amy Luis Vera Dan Kate Juan
""")
COUNTED = words("""
    shells stamps marbles apples stickers beads coins cards pencils books buttons photos cookies eggs oranges tickets
    bricks bottles candles tiles seeds pears toys balloons crayons stones lemons plums flowers cups nuts letters badges
    chairs
""")
MEASURED = [
    *("dollars", "liters of water", "liters of milk", "liters of juice", "kilograms of flour", "kilograms of rice"),
    *("meters of rope", "meters of wire", "pounds of sugar", "pounds of corn", "bags of sand", "sheets of paper"),
]
CONTAINERS = [
    *(("boxes", "box"), ("bags", "bag"), ("baskets", "basket"), ("jars", "jar"), ("crates", "crate")),
    *(("packs", "pack"), ("trays", "tray"), ("rows", "row"), ("drawers", "drawer"), ("bins", "bin")),
]
TIMES = {2: "twice"}
FRACTIONS = {2: "half of", 3: "a third of", 4: "a quarter of", 5: "a fifth of"}
