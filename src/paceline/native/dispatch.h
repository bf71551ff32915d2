// Chooses the kernels for this processor.
#pragma once
#include <string>
#include <vector>

#include "types.h"

namespace paceline {

// Paths that were compiled in and that this processor can run, fastest first.
std::vector<std::string> available_paths();

// The table of a path; nullptr where it cannot run here.
const Kernels* find_kernels(const std::string& name);

}  // namespace paceline
