"""A few documents, and files of them, shared by the archive's tests."""

import io
import tarfile

from daric_rag.document_info import DocumentInfo, encode_document
from daric_rag.storage.archive import export_documents
from daric_rag.storage.documents import DocumentTree
from tests.storage.records import document, key, payload, read


def titled(number, title):
    return encode_document(DocumentInfo(key(900 + number), title, 9, "default"))


# Two documents with a common beginning, and the beginning of a raw prompt.
REPORT = document([1, 2, 3], titled(1, "Report"))
PLAN = [REPORT[0], *document([1, 5], titled(2, "Plan"))[1:]]
PROMPT = document([7])
NUMBERS = (1, 2, 3, 5, 7)


def write_all(tier):
    for one in (*REPORT, *PLAN, *PROMPT):
        tier.write(one)


def export(tier, path, titles=None, **options):
    tree = DocumentTree(tier.segments())
    chosen = [d for d in tree.documents if titles is None or d.title in titles]
    return export_documents(tier.directory, tree, chosen, path, **options)


def held(tier):
    return {n for n in NUMBERS if read(tier, n) == payload(n)}


def documents(tier):
    return {(d.title, d.pinned) for d in DocumentTree(tier.segments()).documents}


def members_of(path):
    with tarfile.open(path) as tar:
        return [(m, tar.extractfile(m).read()) for m in tar.getmembers()]


def write_tar(path, members):
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
