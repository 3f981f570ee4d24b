// Settings from the environment, counters, and the summary at the end of a process.
#include "runtime.h"

#include <unistd.h>

#include <chrono>
#include <cstring>

namespace fakecuda {

uint64_t bytes_of(const char* name, uint64_t otherwise) {
  const char* text = getenv(name);
  if (!text || !*text) return otherwise;
  char* end;
  double value = strtod(text, &end);
  const std::pair<const char*, double> units[] = {{"GiB", 1ull << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10},
                                                  {"GB", 1e9}, {"MB", 1e6}, {"G", 1ull << 30}, {"M", 1 << 20}};
  for (auto& [unit, factor] : units)
    if (!strcmp(end, unit)) return uint64_t(value * factor);
  return uint64_t(value);
}

Settings& settings() {
  static Settings* s = new Settings;
  return *s;
}

std::vector<int>& visible() {
  static auto* list = [] {
    auto* found = new std::vector<int>;
    const char* text = getenv("CUDA_VISIBLE_DEVICES");
    if (!text) {
      for (int i = 0; i < settings().devices; i++) found->push_back(i);
      return found;
    }
    for (const char* at = text; *at;) {
      char* end;
      long number = strtol(at, &end, 10);
      if (end == at || number < 0 || number >= settings().devices) break;
      found->push_back(int(number));
      at = *end == ',' ? end + 1 : end;
    }
    return found;
  }();
  return *list;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::mutex& counter_lock() { static auto* m = new std::mutex; return *m; }
std::map<std::string, long long>& counters() { static auto* m = new std::map<std::string, long long>; return *m; }

void print_summary() {
  if (!settings().verbose) return;
  std::lock_guard<std::mutex> hold(counter_lock());
  FILE* file = fakecuda_report();
  fprintf(file, "[fakecuda] pid %d:", getpid());
  for (auto& [name, count] : counters()) fprintf(file, " %s=%lld;", name.c_str(), count);
  fprintf(file, "\n");
  fflush(file);
}

}  // namespace fakecuda

using namespace fakecuda;

extern "C" {

double fakecuda_env(const char* name, double otherwise) {
  const char* text = getenv(name);
  return text && *text ? atof(text) : otherwise;
}
FILE* fakecuda_report() {
  const char* path = getenv("FAKECUDA_STATS");
  FILE* file = path && *path ? fopen(path, "a") : nullptr;
  return file ? file : stderr;
}
void fakecuda_note(const char* counter, long long by) {
  std::lock_guard<std::mutex> hold(counter_lock());
  counters()[counter] += by;
}
static std::vector<void (*)()>& reports() { static auto* list = new std::vector<void (*)()>; return *list; }
void fakecuda_at_end(void (*report)()) { reports().push_back(report); }
void fakecuda_summary() {
  static std::atomic<bool> told{false};
  if (told.exchange(true)) return;
  for (auto report : reports()) report();
  print_summary();
}

}  // extern "C"
