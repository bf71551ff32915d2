#include "dispatch.h"

namespace paceline {

#ifdef PACELINE_HAVE_AVX512
extern const Kernels kernels_avx512;
#endif
#ifdef PACELINE_HAVE_AVXVNNI
extern const Kernels kernels_avxvnni;
#endif
#ifdef PACELINE_HAVE_AVX2
extern const Kernels kernels_avx2;
#endif
extern const Kernels kernels_portable;

namespace {

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni");
}
// CPUID leaf 7, sub-leaf 1, EAX bit 4 (older compilers do not know the name "avxvnni").
[[maybe_unused]] bool has_avxvnni() {
  unsigned a = 7, b = 0, c = 1, d = 0;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return has_avx2() && ((a >> 4) & 1u) != 0;
}
#endif

std::vector<const Kernels*> find_runnable() {
  std::vector<const Kernels*> found;
#ifdef PACELINE_HAVE_AVX512
  if (has_avx512()) found.push_back(&kernels_avx512);
#endif
#ifdef PACELINE_HAVE_AVXVNNI
  if (has_avxvnni()) found.push_back(&kernels_avxvnni);
#endif
#ifdef PACELINE_HAVE_AVX2
  if (has_avx2()) found.push_back(&kernels_avx2);
#endif
  found.push_back(&kernels_portable);
  return found;
}

// Found once: to ask the processor takes microseconds in a virtual machine.
const std::vector<const Kernels*>& runnable() {
  static const std::vector<const Kernels*> found = find_runnable();
  return found;
}

}  // namespace

std::vector<std::string> available_paths() {
  std::vector<std::string> names;
  for (const Kernels* k : runnable()) names.emplace_back(k->name);
  return names;
}

const Kernels* find_kernels(const std::string& name) {
  for (const Kernels* k : runnable())
    if (name == k->name) return k;
  return nullptr;
}

}  // namespace paceline
