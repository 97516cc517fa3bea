"""From rows to documents, and from what an operator types to the documents meant."""

import random

import pytest

from daric_rag.document_info import DocumentInfo, encode_document
from daric_rag.errors import ConfigError
from daric_rag.storage.admin import plan_eviction
from daric_rag.storage.database import SegmentRow
from daric_rag.storage.document_selection import Selection, select
from daric_rag.storage.documents import DocumentTree
from tests.storage.records import FINGERPRINT, OTHER_FINGERPRINT, ROOT, key

NOW = 1_000_000.0
DAY = 86_400.0


def row(number, parent, index, *, title=None, **fields):
    side_data = b""
    if title is not None:
        namespace = fields.pop("namespace", "default")
        info = DocumentInfo(key(number + 500), title, 3 * (index + 1), namespace)
        side_data = encode_document(info)
    values = {
        "fingerprint": FINGERPRINT,
        "num_tokens": 3,
        "nbytes": 100 + number,
        "filename": f"{number}",
        "last_used": NOW,
        "uses": 1,
        "pinned": False,
        **fields,
    }
    return SegmentRow(
        key(number),
        parent if isinstance(parent, bytes) else key(parent),
        segment_index=index,
        side_data=side_data,
        **values,
    )


# 1 -- 2 [Report]
#  \-- 3 -- 4 [Addendum] -- 5 (nothing said)
ROWS = [
    row(5, 4, 2 + 1),
    row(4, 3, 2, title="Addendum"),
    row(2, 1, 1, title="Report"),
    row(1, ROOT, 0),
    row(3, 1, 1),
]


def by_key(tree):
    return {document.key: document for document in tree.documents}


def test_documents_share_their_beginning():
    tree = DocumentTree(ROWS)
    documents = by_key(tree)
    assert set(documents) == {key(2), key(4), key(5)}
    report, addendum, rest = (documents[key(n)] for n in (2, 4, 5))
    assert (report.title, addendum.title, rest.title) == ("Report", "Addendum", "")
    assert report.document_hash == key(502)
    assert rest.document_hash is None
    # 101 is shared by all, 103 and 104 by addendum and rest.
    assert (report.nbytes, report.own_bytes) == (101 + 102, 102)
    assert (addendum.nbytes, addendum.own_bytes) == (101 + 103 + 104, 0)
    assert (rest.nbytes, rest.own_bytes) == (101 + 103 + 104 + 105, 105)
    assert [d.num_segments for d in (report, addendum, rest)] == [2, 3, 4]
    assert [d.num_tokens for d in (report, addendum, rest)] == [6, 9, 12]
    assert all(d.complete for d in tree.documents)
    assert [r.key for r in tree.segments_of([addendum])] == [key(1), key(3), key(4)]


def test_own_bytes_are_what_evicting_a_document_alone_frees():
    generator = random.Random(7)
    rows = [row(0, ROOT, 0)]
    for number in range(1, 80):
        parent = generator.choice(rows)
        title = "t" if generator.random() < 0.3 else None
        rows.append(row(number, parent.key, parent.segment_index + 1, title=title))
    generator.shuffle(rows)
    tree = DocumentTree(rows)
    for document in tree.documents:
        rest = [d for d in tree.documents if d is not document]
        needed = {r.key for d in rest for r in tree.segments_of([d])}
        own = [r for r in tree.segments_of([document]) if r.key not in needed]
        assert document.own_bytes == sum(r.nbytes for r in own)
        assert tree.only_of([document]) == own[::-1]


def test_segments_come_once_and_document_by_document():
    tree = DocumentTree(ROWS)
    documents = by_key(tree)
    chosen = [documents[key(5)], documents[key(2)], documents[key(4)]]
    assert [r.key for r in tree.segments_of(chosen)] == [*map(key, (1, 3, 4, 5, 2))]
    assert tree.segments_of([]) == []


def test_all_documents_leave_nothing_and_children_go_first():
    tree = DocumentTree(ROWS)
    numbers = [int.from_bytes(r.key, "big") for r in tree.only_of(tree.documents)]
    assert sorted(numbers) == [1, 2, 3, 4, 5]
    assert numbers.index(5) < numbers.index(4) < numbers.index(3) < numbers.index(1)
    assert tree.only_of([]) == []


def test_an_untitled_document_is_of_its_root_s_namespace():
    rows = [
        row(1, ROOT, 0, title="Titled", namespace="tenant"),
        row(2, ROOT, 0),
        row(3, b"other root".ljust(32), 0),
    ]
    tree = DocumentTree(rows)
    documents = by_key(tree)
    assert documents[key(2)].namespace == "tenant"
    assert documents[key(3)].namespace is None
    assert tree.nbytes_by_namespace() == {"tenant": 101 + 102, None: 103}


def test_a_document_with_a_hole_is_incomplete():
    rows = [row(1, ROOT, 0), row(3, 2, 2, title="Holed")]
    documents = by_key(DocumentTree(rows))
    assert documents[key(1)].complete
    assert not documents[key(3)].complete
    assert documents[key(3)].num_segments == 1


def test_rows_that_contradict_each_other_end_no_loop():
    rows = [
        row(1, 2, 1, title="Each is the other's parent"),
        row(2, 1, 1),
        row(3, 3, 4, title="Its own parent"),
        row(4, 1, 2, fingerprint=OTHER_FINGERPRINT),
    ]
    tree = DocumentTree(rows)
    assert len(tree.documents) == 4
    assert {d.num_segments for d in tree.documents} == {1}
    assert not any(d.complete for d in tree.documents)


def test_side_data_of_others_makes_no_title():
    (document,) = DocumentTree(
        [SegmentRow(key(1), ROOT, FINGERPRINT, 0, 3, 9, "f", NOW, 1, False, b"[1]")]
    ).documents
    assert document.title == ""


def test_needing_names_the_documents_that_a_segment_is_part_of():
    tree = DocumentTree(ROWS)
    assert {d.key for d in tree.needing([key(3)])} == {key(4), key(5)}
    assert {d.key for d in tree.needing([key(1)])} == {key(2), key(4), key(5)}
    assert tree.needing([]) == tree.needing([key(99)]) == []


def test_pinned_documents_and_what_they_share_are_no_victims():
    rows = [
        row(1, ROOT, 0),
        row(2, 1, 1, title="Pinned", pinned=True),
        row(3, 1, 1, title="Other"),
    ]
    tree = DocumentTree(rows)
    plan = plan_eviction(tree, tree.documents)
    assert [d.title for d in plan.pinned] == ["Pinned"]
    assert [r.key for r in plan.segments] == [key(3)]
    assert plan.nbytes == 103


# ------------------------------------------------------------------------ selection

LIBRARY = DocumentTree(
    [
        row(0xABCD, ROOT, 0, title="Annual report", last_used=NOW - 8 * DAY),
        row(0xABCE, ROOT, 0, title="annual plan", last_used=NOW - DAY),
        row(
            0x1234,
            b"tenant root".ljust(32),
            0,
            title="Minutes",
            namespace="tenant",
            fingerprint=OTHER_FINGERPRINT,
        ),
    ]
).documents


def titles(**selection):
    return {d.title for d in select(LIBRARY, Selection(**selection), now=NOW)}


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({}, {"Annual report", "annual plan", "Minutes"}),
        ({"title": "ANNUAL*"}, {"Annual report", "annual plan"}),
        ({"title": "annual"}, set()),
        ({"title": "[am]*"}, {"Annual report", "annual plan", "Minutes"}),
        ({"namespace": "tenant"}, {"Minutes"}),
        ({"model": OTHER_FINGERPRINT.hex()[:6].upper()}, {"Minutes"}),
        ({"unused_for_s": 7 * DAY}, {"Annual report"}),
        ({"title": "*a*", "unused_for_s": DAY}, {"Annual report", "annual plan"}),
        ({"all": True}, {"Annual report", "annual plan", "Minutes"}),
    ],
)
def test_filters_all_apply(selection, expected):
    assert titles(**selection) == expected


def test_a_name_is_the_beginning_of_a_hash_or_a_key():
    assert titles(names=(key(0xABCD).hex(),)) == {"Annual report"}
    assert titles(names=(key(0xABCD + 500).hex().upper(),)) == {"Annual report"}
    both = (key(0xABCD).hex(), key(0x1234).hex(), key(0x1234 + 500).hex())
    assert titles(names=both) == {"Annual report", "Minutes"}


def test_an_ambiguous_name_lists_the_documents():
    prefix = key(0xABCD).hex()[:-1]
    with pytest.raises(ConfigError, match="2 documents begin with") as raised:
        titles(names=(prefix,))
    assert "'Annual report'" in str(raised.value)
    assert "'annual plan'" in str(raised.value)
    assert "Minutes" not in str(raised.value)
    assert titles(names=(prefix,), title="*plan") == {"annual plan"}


def test_one_document_whose_hash_and_key_begin_alike_is_not_ambiguous():
    assert titles(names=("0000",), namespace="tenant") == {"Minutes"}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("abc", "4 or more hex digits"),
        ("xyz9", "4 or more hex digits"),
        ("ffff", "no document here begins with 'ffff'"),
    ],
)
def test_a_name_that_fits_nothing_is_refused(name, text):
    with pytest.raises(ConfigError, match=text):
        titles(names=(name,))


@pytest.mark.parametrize("model", ["", "abc", "xyz9", "abcd "])
def test_a_model_that_is_no_fingerprint_is_refused(model):
    with pytest.raises(ConfigError, match="names no model: give 4 or more hex digits"):
        titles(model=model)


def test_an_empty_title_is_that_of_untitled_documents():
    assert titles(title="") == set()
    untitled = DocumentTree([row(1, ROOT, 0), row(2, ROOT, 0, title="Titled")])
    chosen = select(untitled.documents, Selection(title=""), now=NOW)
    assert [document.key for document in chosen] == [key(1)]


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ({"all": True}, True),
        ({"unused_for_s": 0.0}, True),
        ({"title": "**"}, True),
        ({"title": "*", "unused_for_s": 0.0}, True),
        ({"title": ""}, False),
        ({"title": "*t"}, False),
        ({"unused_for_s": 1.0}, False),
        ({"all": True, "namespace": "tenant"}, False),
        ({"unused_for_s": 0.0, "model": "abcd"}, False),
        ({"unused_for_s": 0.0, "names": ("abcd",)}, False),
    ],
)
def test_a_selection_without_limits_knows_that_it_has_none(selection, expected):
    assert Selection(**selection).is_unlimited is expected


def test_an_empty_selection_knows_that_it_is():
    assert Selection().is_empty
    assert not Selection(all=True).is_empty
    assert not Selection(unused_for_s=0.0).is_empty
