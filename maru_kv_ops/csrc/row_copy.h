// Moving a piece of one row with the widest accesses that both of its ends allow.
//
// The unit is chosen piece by piece from the addresses themselves: bases, strides and skipped
// prefixes may each break an alignment, and a 16-byte access to an address that is not a multiple
// of 16 is a fault on a device. What is left behind the last whole unit moves in bytes.

#pragma once

#include <cstdint>

#include "strided_copy.h"

namespace maru {

struct alignas(16) Unit16 {
    uint64_t low, high;
};

// Units that one lane has in flight: it issues so many loads before the first store waits for one.
// What a copy from slow memory reaches is the bytes in flight over the memory's latency.
inline constexpr int kUnitsInFlight = 4;

// Bytes of the widest unit for a piece between these addresses: 16, 8, 4, 2 or 1.
MARU_HD int widest_unit(const void* destination, const void* source, int64_t bytes) {
    const uint64_t bits =
        reinterpret_cast<uintptr_t>(destination) | reinterpret_cast<uintptr_t>(source);
    int unit = 16;
    while (unit > 1 && (bits % static_cast<uint64_t>(unit) != 0 || bytes < unit))
        unit /= 2;
    return unit;
}

// Memory: an object with `template <class T> T load(const T*)` and `template <class T> void
// store(T*, T)`. `lanes` callers share the piece; this is number `lane` of them.
template <class Unit, class Memory>
MARU_HD void move_units(Memory& memory, uint8_t* destination, const uint8_t* source, int64_t bytes,
                        int lane, int lanes) {
    const int64_t whole = bytes / static_cast<int64_t>(sizeof(Unit));
    Unit* to = reinterpret_cast<Unit*>(destination);
    const Unit* from = reinterpret_cast<const Unit*>(source);
    for (int64_t first = lane; first < whole; first += int64_t{kUnitsInFlight} * lanes) {
        Unit held[kUnitsInFlight];
        for (int k = 0; k < kUnitsInFlight; ++k) {
            const int64_t i = first + int64_t{k} * lanes;
            if (i < whole)
                held[k] = memory.template load<Unit>(from + i);
        }
        for (int k = 0; k < kUnitsInFlight; ++k) {
            const int64_t i = first + int64_t{k} * lanes;
            if (i < whole)
                memory.template store<Unit>(to + i, held[k]);
        }
    }
    for (int64_t i = whole * static_cast<int64_t>(sizeof(Unit)) + lane; i < bytes; i += lanes)
        memory.template store<uint8_t>(destination + i, memory.template load<uint8_t>(source + i));
}

template <class Memory>
MARU_HD void move_piece(Memory& memory, uint8_t* destination, const uint8_t* source, int64_t bytes,
                        int lane, int lanes) {
    switch (widest_unit(destination, source, bytes)) {
    case 16:
        move_units<Unit16>(memory, destination, source, bytes, lane, lanes);
        break;
    case 8:
        move_units<uint64_t>(memory, destination, source, bytes, lane, lanes);
        break;
    case 4:
        move_units<uint32_t>(memory, destination, source, bytes, lane, lanes);
        break;
    case 2:
        move_units<uint16_t>(memory, destination, source, bytes, lane, lanes);
        break;
    default:
        move_units<uint8_t>(memory, destination, source, bytes, lane, lanes);
        break;
    }
}

} // namespace maru
