// What MARU_DEBUG_CHECKS=1 checks beyond what every call does. Needs the ids on the host.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "../csrc/transfers.h"

namespace maru::binding {

// Read at every call, so that it can be switched while a process runs.
inline bool debug_checks_are_on() {
    const char* value = std::getenv("MARU_DEBUG_CHECKS");
    return value != nullptr && std::string(value) == "1";
}

// Refuses ids that the cache does not have, and those that a load names twice. `ids`: all of the
// call, also those before the plan's first.
inline void debug_check_ids(const TransferPlan& plan, std::vector<int64_t> ids) {
    check_ids(plan, NumberList{ids.data(), static_cast<int64_t>(ids.size())});
    if (plan.copies.empty() || plan.copies.front().direction != TransferDirection::H2D)
        return;
    ids.erase(ids.begin(), ids.begin() + plan.first_id);
    std::sort(ids.begin(), ids.end());
    const auto used = std::lower_bound(ids.begin(), ids.end(), int64_t{0});
    const auto twice = std::adjacent_find(used, ids.end());
    if (twice != ids.end())
        throw std::invalid_argument(
            std::string(plan.id_name) + " " + std::to_string(*twice) +
            " is named twice by one load, which would leave whichever comes last; nothing was "
            "moved");
}

} // namespace maru::binding
