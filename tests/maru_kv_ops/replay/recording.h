// Memory that takes down every access of the kernel's body, and the rules that hold for them.

#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace replay {

struct Interval {
    int64_t first, end;
};

inline std::string text(const Interval& interval) {
    std::ostringstream out;
    out << '[' << interval.first << ", " << interval.end << ')';
    return out.str();
}

// Neighbours joined. Intervals that overlap are an error, or are joined as well.
enum class Overlap { kRefused, kJoined };

inline std::vector<Interval> joined(std::vector<Interval> intervals, Overlap overlap) {
    std::sort(intervals.begin(), intervals.end(),
              [](const Interval& a, const Interval& b) { return a.first < b.first; });
    std::vector<Interval> result;
    for (const Interval& next : intervals) {
        if (result.empty() || next.first > result.back().end) {
            result.push_back(next);
            continue;
        }
        if (next.first < result.back().end && overlap == Overlap::kRefused)
            throw std::logic_error("written twice: " + text(next) + " and " + text(result.back()));
        result.back().end = std::max(result.back().end, next.end);
    }
    return result;
}

struct Record {
    std::vector<Interval> reads, writes;
    std::map<int, int64_t> stores_by_unit; // bytes of the unit -> stores

    // std::logic_error unless every byte was written once, and none that was read.
    void check() const {
        const std::vector<Interval> written = joined(writes, Overlap::kRefused);
        const std::vector<Interval> read = joined(reads, Overlap::kJoined);
        size_t i = 0;
        for (const Interval& source : read) {
            while (i < written.size() && written[i].end <= source.first)
                ++i;
            if (i < written.size() && written[i].first < source.end)
                throw std::logic_error("a source is written: " + text(written[i]) + ", read as " +
                                       text(source));
        }
    }

    int64_t num_written() const {
        int64_t bytes = 0;
        for (const Interval& interval : writes)
            bytes += interval.end - interval.first;
        return bytes;
    }
};

// Whether the addresses are real ones, or only numbers.
enum class Addresses { kReal, kNumbers };

template <Addresses kAddresses> class RecordingMemory {
  public:
    explicit RecordingMemory(Record& record) : record_(record) {}

    template <class T> T load(const T* from) {
        note(record_.reads, from, sizeof(T));
        if constexpr (kAddresses == Addresses::kReal)
            return *from;
        else
            return T{};
    }

    template <class T> void store(T* to, T value) {
        note(record_.writes, to, sizeof(T));
        ++record_.stores_by_unit[static_cast<int>(sizeof(T))];
        if constexpr (kAddresses == Addresses::kReal)
            *to = value;
        else
            static_cast<void>(value);
    }

  private:
    static void note(std::vector<Interval>& list, const void* address, size_t bytes) {
        const auto first = reinterpret_cast<int64_t>(address);
        const auto size = static_cast<int64_t>(bytes);
        if (first % size != 0)
            throw std::logic_error("an access of " + std::to_string(size) + " bytes to address " +
                                   std::to_string(first));
        list.push_back({first, first + size});
    }

    Record& record_;
};

} // namespace replay
