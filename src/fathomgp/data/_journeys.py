"""Generated taxi journeys: the nine inputs of the DSVI paper's largest experiment, with a known travel time.

    duration = f(time of day, day of week, day of month, month, pick-up, drop-off, distance) + N(0, 45^2) seconds

The function is smooth in most places and steep in a few: rush hours on working days near the centre, a river whose
bridges cost minutes, and a motorway for long journeys. No one lengthscale suits it. The noise is known, so the best
reachable RMSE is too.
"""

import numpy as np
from jaxtyping import Float, Float32, Float64

#: Standard deviation of the noise in seconds: the best reachable RMSE.
JOURNEY_NOISE = 45.0

#: Column names of the inputs; the target is ``duration``.
JOURNEY_INPUTS = (
    "time_of_day",
    "day_of_week",
    "day_of_month",
    "month",
    "pickup_latitude",
    "pickup_longitude",
    "dropoff_latitude",
    "dropoff_longitude",
    "distance",
)

_CENTRE = (40.75, -73.98)
_KM = (111.2, 84.2)  # a degree of latitude and of longitude at this latitude


def journey_seconds(X: Float[np.ndarray, "N 9"]) -> Float64[np.ndarray, " N"]:
    """The expected travel time in seconds, given the columns :data:`JOURNEY_INPUTS`."""
    hour, weekday, day, month, *places, distance = X.astype(np.float64).T
    north, east, north_off, east_off = _to_km(*places)
    working = _step(4.5 - weekday, 0.1)
    rush = working * (_bump(hour, 8.5, 0.8) + 1.2 * _bump(hour, 17.5, 1.0)) + 0.3 * _bump(hour, 13.0, 2.5)
    night = _step(6.0 - hour, 0.3) + _step(hour - 22.0, 0.3)
    busy = np.exp(-((north - 1.0) ** 2 + east**2) / 18.0) + np.exp(-((north_off - 1.0) ** 2 + east_off**2) / 18.0)
    speed = 24.0 * (1.0 + 0.45 * night) / (1.0 + 0.7 * rush * busy + 0.25 * busy)
    winter = 1.0 + 0.15 * _bump(month, 1.5, 0.8) + 0.04 * _bump(day, 28.0, 2.0)
    # Beyond about seven kilometres the rest of the way is motorway.
    street = 7.0 - np.logaddexp(0.0, 4.0 * (7.0 - distance)) / 4.0
    motorway = distance - street
    driving = winter * 3600.0 * (street / speed + motorway / 65.0)
    return 150.0 + driving + _crossing(north, east, north_off, east_off, rush)


def draw_journeys(rows: int, rng: np.random.Generator) -> dict[str, Float32[np.ndarray, " N"]]:
    """Random journeys with their noisy duration, column by column, in float32 as they are stored."""
    pickup, dropoff = _place(rows, rng), _place(rows, rng)
    north, east, north_off, east_off = _to_km(*pickup, *dropoff)
    distance = (0.3 + np.abs(north - north_off) + np.abs(east - east_off)) * rng.lognormal(0.05, 0.12, rows)
    columns = (_hour(rows, rng), *_calendar(rows, rng), *pickup, *dropoff, distance)
    X = np.column_stack(columns).astype(np.float32)  # the truth is that of the inputs as they are stored
    duration = journey_seconds(X) + JOURNEY_NOISE * rng.standard_normal(rows)
    table = {name: np.ascontiguousarray(X[:, j]) for j, name in enumerate(JOURNEY_INPUTS)}
    return table | {"duration": duration.astype(np.float32)}


def _hour(rows: int, rng: np.random.Generator) -> Float64[np.ndarray, " N"]:
    """Hours of the day: a broad day with an evening peak."""
    evening = rng.random(rows) < 0.35
    return np.where(evening, rng.normal(19.0, 2.5, rows), rng.uniform(0.0, 24.0, rows)) % 24.0


def _calendar(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Days of the week (0 is Monday) and of the month, and the month."""
    days = rng.integers([0, 1, 1], [7, 32, 13], (rows, 3)).astype(np.float64)
    return days[:, 0], days[:, 1], days[:, 2]


def _place(rows: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Latitude and longitude: the centre, two quarters, and an airport."""
    quarter = rng.choice(4, rows, p=[0.55, 0.2, 0.17, 0.08])
    spread = np.array([2.2, 2.5, 3.0, 0.4])[quarter]
    north = np.array([1.0, -5.0, 6.0, -9.0])[quarter] + spread * rng.standard_normal(rows)
    east = np.array([0.0, 3.5, 5.0, 15.0])[quarter] + spread * rng.standard_normal(rows)
    return _CENTRE[0] + north / _KM[0], _CENTRE[1] + east / _KM[1]


def _to_km(*places: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Kilometres north and east of the centre, of pick-up and drop-off."""
    latitude, longitude, latitude_off, longitude_off = places
    return (
        (latitude - _CENTRE[0]) * _KM[0],
        (longitude - _CENTRE[1]) * _KM[1],
        (latitude_off - _CENTRE[0]) * _KM[0],
        (longitude_off - _CENTRE[1]) * _KM[1],
    )


def _crossing(north: np.ndarray, east: np.ndarray, north_off: np.ndarray, east_off: np.ndarray, rush: np.ndarray):
    """Seconds lost at a bridge: 0 on one bank, minutes from one bank to the other, more at the rush."""
    side = _step(east - 2.0 - 0.25 * north, 0.15)
    side_off = _step(east_off - 2.0 - 0.25 * north_off, 0.15)
    across = side * (1.0 - side_off) + side_off * (1.0 - side)
    return across * (180.0 + 260.0 * rush)


def _bump(x: np.ndarray, centre: float, width: float) -> np.ndarray:
    return np.exp(-0.5 * ((x - centre) / width) ** 2)


def _step(x: np.ndarray, width: float) -> np.ndarray:
    """From 0 to 1 around 0, over a few widths."""
    return 0.5 + 0.5 * np.tanh(x / (2.0 * width))
