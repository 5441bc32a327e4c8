"""The one reader of CSV and Parquet: what does not add up is refused with its line."""

import io

import numpy as np
import pandas as pd
import pytest

from fathomgp.data import CsvFile, convert_csv, read_blocks, read_inputs, read_labels, read_table, read_targets
from fathomgp.errors import DataError


def csv_of(text):
    return CsvFile(io.BytesIO(text if isinstance(text, bytes) else text.encode()), "data.csv")


def everything(text):
    return csv_of(text).take()


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("a,b\n1,2,3\n", "Line 2 of data.csv has 3 fields, but the header names 2 columns"),
        ("a,b\n1,2\n\n3\n", "Line 4 of data.csv has 1 field, but the header names 2"),
        ("a,b\n1,2,\n3,4,\n", "Line 2 of data.csv has 3 fields"),
        ('a,b\n"x\ny",2\n1,2,3\n', "Line 4 of data.csv has 3 fields"),
        ("a;b\n1,5;2,5\n", "has semicolons between its fields: export it with commas, and points in numbers"),
        ("a\tb\n1\t2\n", "has tabs between its fields"),
        ("a,a\n1,2\n", "several columns named 'a'"),
        ("", "data.csv is empty"),
        ("\n \n", "data.csv is empty"),
        ('a,b\n1,"2\n3,4\n', "Line 2 of data.csv cannot be read"),
        ('a,b\n1,"2"x\n', "Line 2 of data.csv cannot be read"),
        ("a,b\n1,2\nä,3\n".encode("latin-1"), r"not in UTF-8 \(byte 0xe4 in line 3\): save it as UTF-8"),
        ("a,b\n1,2\n".encode("utf-16"), "data.csv is in UTF-16: save it as UTF-8"),
        ("a,b\n1,2\n".encode("utf-16-le"), "Line 1 of data.csv is no text"),
        (b"\x1f\x8b\x08\x00abc", "compressed with gzip: unpack it"),
        (b"PK\x03\x04abc", "is a zip archive or a spreadsheet"),
        ("a,b\n" + "1," * 500_000 + "1\n", "Line 2 of data.csv has 500,001 fields"),
        ("a," * 500_000 + "a\n", "data.csv has 500,001 columns"),
    ],
)
def test_what_does_not_add_up_is_refused_with_its_line(content, sentence):
    with pytest.raises(DataError, match=sentence):
        everything(content)


def test_a_line_without_end_is_refused():
    class Endless(io.RawIOBase):
        def readable(self):
            return True

        def readinto(self, buffer):
            buffer[:] = b"1" * len(buffer)
            return len(buffer)

    with pytest.raises(DataError, match=r"Line 1 of data\.csv is no text"):
        CsvFile(Endless(), "data.csv")


def test_values_are_those_of_pandas(tmp_path):
    text = '\ufeffa,"b, c",d\r\n1,0.1,"x"\r\n\r\n-3e5,,"two\r\nlines ""quoted"""\r\n'
    frame = everything(text)
    expected = pd.read_csv(io.StringIO(text.lstrip("\ufeff")))
    pd.testing.assert_frame_equal(frame.reset_index(drop=True), expected)
    assert frame.index.tolist() == [2, 4]
    assert everything("a,b\r1,2\r3,4").to_numpy().tolist() == [[1, 2], [3, 4]]
    assert everything(",a\n0,1").columns.tolist() == ["Unnamed: 0", "a"]
    assert everything("a\n99999999999999999999\n" + "9" * 400).a.tolist() == [1e20, np.inf]


def test_rows_come_in_blocks_with_their_lines(tmp_path):
    (tmp_path / "data.csv").write_text("a,b\n" + "".join(f"{i},{i}\n" for i in range(7)))
    blocks = list(read_blocks(tmp_path / "data.csv", 3))
    assert [block.index.tolist() for block in blocks] == [[2, 3, 4], [5, 6, 7], [8]]
    pd.concat(blocks).to_parquet(tmp_path / "data.parquet")
    blocks = list(read_blocks(tmp_path / "data.parquet", 4))
    assert [block.index.tolist() for block in blocks] == [[0, 1, 2, 3], [4, 5, 6]]
    table = csv_of("a\n0\n1\n2\n3\n")
    table.skip(2)
    assert table.take(1).a.tolist() == [2]
    assert table.take().a.tolist() == [3]
    assert table.take() is None


def test_the_cell_that_cannot_be_read_is_named_with_its_line(tmp_path):
    """Not the first text, which may look like a number, and not its place in a block or a split."""
    (tmp_path / "data.csv").write_text("a,b\n1,2\n3,4\n5,x\n7,y\n")
    with pytest.raises(DataError, match=r"Column 'b' of data.csv holds text \('x' in line 4\)"):
        read_table(tmp_path / "data.csv", target="a")
    with pytest.raises(DataError, match=r"Column 'b' of data.csv holds text \('x' in line 4\)"):
        convert_csv(tmp_path / "data.csv", tmp_path / "out")
    frame = everything("a,b\n1,2\n3,4\n5,\n7,inf\n")
    with pytest.raises(DataError, match=r"Column 'b' of X contains NaN \(first in line 4\)"):
        read_inputs(frame)
    with pytest.raises(DataError, match=r"Column 'b' of X contains inf \(first in line 5\)"):
        read_inputs(frame.iloc[[1, 3]])
    with pytest.raises(DataError, match=r"y contains NaN \(first in line 4\)"):
        read_targets(frame.b)
    with pytest.raises(DataError, match=r"first in row 1, labelled 7\)"):
        read_inputs(pd.DataFrame({"a": [1.0, np.nan]}, index=[5, 7]))
    with pytest.raises(DataError, match=r"y contains NaN \(first in line 4\)"):
        read_labels(frame.b)


def test_numbers_too_large_for_single_precision_are_not_turned_into_infinity(tmp_path):
    (tmp_path / "data.csv").write_text("a,b\n1,2\n1e300,4\n")
    with pytest.raises(DataError, match=r"holds 1e\+300 in line 3, which is too large for float32"):
        convert_csv(tmp_path / "data.csv", tmp_path / "out")
