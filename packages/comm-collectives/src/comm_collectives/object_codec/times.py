"""Dates, times and fixed offsets from UTC."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date, datetime, time, timedelta, timezone
from struct import Struct

from comm_collectives.object_codec.errors import ObjectDecodeError, Refused
from comm_collectives.object_codec.wire import Read, Reader, Tag, Write, Writer

__all__ = ["READERS", "WRITERS"]

_DATE = Struct("=HBB")
_TIMEDELTA = Struct("=iii")
_DATETIME = Struct("=HBBBBBIB")
_TIME = Struct("=BBBIB")


def _write_date(writer: Writer, value: date) -> None:
    writer.out.append(Tag.DATE)
    writer.out += _DATE.pack(value.year, value.month, value.day)


def _write_timedelta(writer: Writer, value: timedelta) -> None:
    writer.out.append(Tag.TIMEDELTA)
    writer.out += _TIMEDELTA.pack(value.days, value.seconds, value.microseconds)


def _write_time(writer: Writer, value: time) -> None:
    writer.out.append(Tag.TIME)
    writer.out += _TIME.pack(value.hour, value.minute, value.second, value.microsecond, value.fold)
    _write_zone(writer, value)


def _write_datetime(writer: Writer, value: datetime) -> None:
    writer.out.append(Tag.DATETIME)
    clock = (value.hour, value.minute, value.second, value.microsecond, value.fold)
    writer.out += _DATETIME.pack(value.year, value.month, value.day, *clock)
    _write_zone(writer, value)


def _write_zone(writer: Writer, value: time | datetime) -> None:
    if type(value.tzinfo) not in (type(None), timezone):
        kind = type(value.tzinfo).__name__
        raise Refused(f"got a time zone of type {kind}; send value.astimezone(datetime.timezone.utc)").within(
            value, ".tzinfo"
        )
    writer.value(value.tzinfo)


def _read_time(reader: Reader) -> time:
    hour, minute, second, microsecond, fold = reader.unpack(_TIME)
    return time(hour, minute, second, microsecond, _read_zone(reader), fold=fold)


def _read_datetime(reader: Reader) -> datetime:
    year, month, day, hour, minute, second, microsecond, fold = reader.unpack(_DATETIME)
    return datetime(year, month, day, hour, minute, second, microsecond, _read_zone(reader), fold=fold)


def _read_zone(reader: Reader) -> timezone | None:
    reader.enter()
    zone = reader.value()
    reader.leave()
    if zone is not None and type(zone) is not timezone:
        raise ObjectDecodeError("a time has an invalid zone")
    return zone


def _write_timezone(writer: Writer, value: timezone) -> None:
    offset, *name = value.__getinitargs__()  # type: ignore[attr-defined]
    writer.out.append(Tag.TIMEZONE)
    writer.value(offset)
    writer.value(name[0] if name else None)


def _read_timezone(reader: Reader) -> timezone:
    reader.enter()
    offset, name = reader.value(), reader.value()
    reader.leave()
    if type(offset) is not timedelta:
        raise ObjectDecodeError("a time zone has no offset")
    return timezone(offset) if name is None else timezone(offset, name)


WRITERS: Mapping[type, Write] = {
    date: _write_date,
    time: _write_time,
    datetime: _write_datetime,
    timedelta: _write_timedelta,
    timezone: _write_timezone,
}

READERS: Mapping[int, Read] = {
    Tag.DATE: lambda reader: date(*reader.unpack(_DATE)),
    Tag.TIME: _read_time,
    Tag.DATETIME: _read_datetime,
    Tag.TIMEDELTA: lambda reader: timedelta(*reader.unpack(_TIMEDELTA)),
    Tag.TIMEZONE: _read_timezone,
}
